// Which characters of an answer were drafted. Events tell the tokens of each step and how many drafts were
// accepted and rejected so far; text arrives beside them, later where a character is unfinished and without
// the tags around reasoning and calls. So texts of tokens are looked for in the text, in order.

// What a token was: `first` (no drafts were checked), `accepted`, `bonus` (the model's own after accepted
// drafts alone), `correction` (the model's own in the place of a rejected draft).
export class DraftTrace {
  constructor() {
    this.tokens = []; // that no text has shown yet
    this.steps = []; // { accepted, rejected, own, kind }: tokens of each sort, and what the own ones are
    this.accepted = 0;
    this.rejected = 0;
  }

  // Takes an event: its tokens as OpenAI's log-probabilities tell them, and the usage so far.
  step(tokens, details) {
    const accepted = details.accepted_prediction_tokens - this.accepted;
    const rejected = details.rejected_prediction_tokens - this.rejected;
    if (!tokens.length) return;
    this.accepted += accepted;
    this.rejected += rejected;
    const kind = kindOf(accepted, rejected);
    this.steps.push({ accepted, rejected, own: tokens.length - accepted, kind });
    tokens.forEach(({ token, logprob }, at) => {
      this.tokens.push({ text: token, logprob, kind: at < accepted ? "accepted" : kind, rejected: 0 });
      if (at === accepted) this.tokens.at(-1).rejected = rejected;
    });
  }

  // The pieces of more text: { text, kind, logprob, rejected } each.
  pieces(text) {
    const found = [];
    for (let at = 0; at < text.length;) {
      const next = this.tokens.findIndex((token) => token.text && text.startsWith(token.text, at));
      if (next >= 0) {
        const passed = this.tokens.splice(0, next + 1), piece = passed.at(-1);
        piece.rejected = passed.reduce((sum, token) => sum + token.rejected, 0); // of silent tokens too
        found.push(piece);
        at += piece.text.length;
      } else {
        const sign = String.fromCodePoint(text.codePointAt(at));
        extend(found, sign, this.tokens[0]?.kind ?? "first");
        at += sign.length;
      }
    }
    return found;
  }

  // How many drafts were rejected in the place of tokens that no text has shown.
  unseen() {
    return this.tokens.reduce((sum, token) => sum + token.rejected, 0);
  }
}

function kindOf(accepted, rejected) {
  if (rejected) return "correction";
  return accepted ? "bonus" : "first";
}

// A character that is no token's whole text: it is of the token that waits.
function extend(found, sign, kind) {
  const last = found.at(-1);
  if (last && last.logprob === null) last.text += sign;
  else found.push({ text: sign, kind, logprob: null, rejected: 0 });
}
