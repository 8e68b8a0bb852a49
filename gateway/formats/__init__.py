"""The bodies of OpenAI's, Anthropic's and SGLang's APIs: read into calls, written as replies."""
