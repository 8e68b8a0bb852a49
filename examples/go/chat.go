// A streamed chat through Eyas' gRPC API, from its proto alone.
//
//	go run . HOST:PORT QUESTION     EYAS_API_KEY: the key, where the server has keys
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"eyas.example/chat/pb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

func chat(address, question string) error {
	// A server with TLS: grpc.WithTransportCredentials, with its authority if the system has it not.
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	// Whatever ends the context early ends the call on the server too, with all that it holds.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if key := os.Getenv("EYAS_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	tokens, temperature := int32(100), 0.0
	stream, err := pb.NewEyasClient(connection).Chat(ctx, &pb.ChatRequest{
		Messages: []*pb.ChatMessage{{Role: pb.ChatRole_CHAT_ROLE_USER, Content: &question}},
		Options:  &pb.GenerateOptions{MaxTokens: &tokens, Temperature: &temperature},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			// The status's message is a sentence; the trailing metadata name the error and the field that is wrong.
			told := stream.Trailer()
			return fmt.Errorf("%s %v %v", status.Convert(err).Message(), told["eyas-code"], told["eyas-param"])
		}
		fmt.Print(response.GetDelta().GetText())
		if finished := response.GetFinished(); finished != nil {
			fmt.Printf("\n%d tokens\n", finished.Usage.CompletionTokens)
		}
	}
}

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: go run . HOST:PORT QUESTION")
		os.Exit(2)
	}
	if err := chat(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
