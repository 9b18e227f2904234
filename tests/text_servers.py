"""A small server that answers as vLLM, SGLang or an API with echo, by a real model; and faults."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

POURED = {"drip": (b" ", 0.02), "endless": (b" " * 2**16, 0)}  # pieces, seconds between them


class Handler(BaseHTTPRequestHandler):
    """Send what the StandIn of the server responds."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(None)

    def do_POST(self):
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body):
        stand_in = self.server.stand_in
        status, content, missing = stand_in.respond(self.path, self.headers, body)
        self.close_connection = True
        with contextlib.suppress(OSError):  # who has asked may be gone
            self.send_response(status)
            if content in POURED:  # the last piece never comes
                self.end_headers()
                piece, seconds = POURED[content]
                while not stand_in.closed.wait(seconds):
                    self.wfile.write(piece)
                return
            self.send_header("Content-Length", str(len(content) + missing))
            self.end_headers()
            self.wfile.write(content)


class StandIn:
    """Score texts over HTTP, in threads of this process.

    Attributes:
        url: its address.
        owner: "vllm" or "sglang", whose answers it copies; else it says of a text, by echo, the
            log-probabilities of its own tokens and no more.
        max_logprobs, context: as the flags of vLLM.
        faults: what goes wrong with the next scoring requests: (status, text), "half", "hang",
            "drip", which sends a byte now and then, "endless", bytes that are the answer, or
            a function that changes the answer; None: nothing.
        reads: None: ids.  Else text alone, refusing ids, and what it says of its tokens: "tokens",
            "offsets", "both", or "stripped" tokens, without the spaces in front of them.
        cards: bytes in place of the list of models.
        requests: (path, headers, body) of all of them.
    """

    def __init__(self, folder, owner="vllm", max_logprobs=1024, context=258, masks_padding=False,
                 reads=None):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.owner = owner
        self.max_logprobs = max_logprobs
        self.context = context
        self.masks_padding = masks_padding
        self.reads = reads
        self.begins = {}  # of the tokens of a text, and its end
        self.faults = []
        self.cards = None
        self.requests = []
        self.at_once = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.closed = threading.Event()

    @contextlib.contextmanager
    def running(self):
        """Serve on a free port meanwhile."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.stand_in = self
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            self.closed.set()
            server.shutdown()
            server.server_close()

    def prompts(self):
        """Return the texts that were to be scored as by vLLM."""
        texts = []
        for path, _, body in self.requests:
            if path.endswith("completions"):
                texts += body["prompt"]
        return texts

    def respond(self, path, headers, body):
        """Return (status, content, bytes of it that will be missing)."""
        self.requests.append((path, dict(headers), body))
        if path.endswith("/v1/models"):
            if self.cards is not None:
                return 200, self.cards, 0
            card = {"id": "teacher", "owned_by": self.owner, "max_model_len": self.context}
            return 200, json.dumps({"object": "list", "data": [card]}).encode(), 0
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            fault = self.faults.pop(0) if self.faults else None
        try:
            return self.score(body, fault)
        finally:
            with self.lock:
                self.at_once -= 1

    def score(self, body, fault):
        if isinstance(fault, bytes) or fault in ("drip", "endless"):
            return 200, fault, 0
        if fault == "hang":
            self.closed.wait(60)
            return 200, b"{}", 0
        asked = body.get("prompt_logprobs") or body.get("top_logprobs_num") or 0
        texts = body.get("prompt") or body.get("input_ids")
        if self.reads and not isinstance(fault, tuple):
            if not all(isinstance(text, str) for text in texts):
                error = {"error": {"message": "prompt: expected a string", "code": 422}}
                return 422, json.dumps(error).encode(), 0
            texts = [self.encoded(text) for text in texts]
        status, error = fault if isinstance(fault, tuple) else (400, self.refusal(texts, asked))
        if self.owner not in ("vllm", "sglang") and "prompt_logprobs" in body:
            error = "unknown field prompt_logprobs"
        if error:
            return status, json.dumps({"error": {"message": error, "code": status}}).encode(), 0
        answers = [self.answer(number, ids, asked) for number, ids in enumerate(texts)]
        if callable(fault):
            fault(answers)
        plain = answers if self.owner == "sglang" else {"choices": answers[::-1]}
        content = json.dumps(plain).encode()
        missing = len(content) // 2 if fault == "half" else 0
        return 200, content[: len(content) - missing], missing

    def encoded(self, text):
        """Return the ids of a text as the server reads it, with bos where it has one."""
        read = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in read["offset_mapping"]] + [len(text)]
        bos = self.tokenizer.bos_token_id
        ids = read["input_ids"]
        if bos is not None:
            ids, begins = [bos, *ids], [0, *begins]
        self.begins[tuple(ids)] = begins
        return ids

    def refusal(self, texts, asked):
        """Return what vLLM says of a request that it refuses, or None."""
        if asked > self.max_logprobs:
            return (f"Requested prompt logprobs of {asked}, which is greater than max allowed: "
                    f"{self.max_logprobs}")
        if max(map(max, texts)) >= self.model.config.vocab_size:
            return f"Token id {max(map(max, texts))} is out of vocabulary"
        if self.context and max(map(len, texts)) + 1 > self.context:
            return f"This model's maximum context length is {self.context} tokens"
        return None

    @torch.no_grad()
    def answer(self, index, ids, asked):
        logits = self.model(torch.tensor([ids])).logits[0, :-1]
        if self.masks_padding:
            logits[:, len(self.tokenizer) :] = -torch.inf
        logp = logits.log_softmax(-1).clamp(min=-9999.0)  # JSON has no infinity
        top = logp.topk(asked)
        if self.owner == "sglang":
            own = [[None, ids[0], None]]
            tops = [None]
            for t, label in enumerate(ids[1:]):
                own.append([logp[t, label].item(), label, None])
                pairs = zip(top.values[t].tolist(), top.indices[t].tolist())
                tops.append([[value, token, None] for value, token in pairs])
            meta = {"input_token_logprobs": own}
            return {"meta_info": meta | ({"input_top_logprobs": tops} if asked else {})}
        if self.reads:
            return {"index": index, "logprobs": self.of_text(ids, logp)}
        if self.owner != "vllm":  # the token that was written behind the text comes last
            of_text = [logp[t, label].item() for t, label in enumerate(ids[1:])]
            return {"index": index, "logprobs": {
                "tokens": [self.tokenizer.decode([token]) for token in [*ids, 0]],
                "token_logprobs": [None, *of_text, -0.5]}}
        positions = [None]
        for t, label in enumerate(ids[1:]):
            entries = {}
            for rank, token in enumerate([label, *top.indices[t].tolist()]):
                entries[str(token)] = {"logprob": logp[t, token].item(), "rank": rank,
                                       "decoded_token": self.tokenizer.decode([token])}
            positions.append(entries)
        return {"index": index, "prompt_logprobs": positions}

    def of_text(self, ids, logp):
        """Return the `logprobs` of a text that is repeated, and of the token behind it."""
        spelled = []
        for end in range(len(ids)):
            before, whole = (self.tokenizer.decode(ids[:stop]) for stop in (end, end + 1))
            token = self.tokenizer.decode([ids[end]])
            if whole[len(before) :].startswith(" ") and self.reads != "stripped":
                token = " " + token.lstrip(" ")  # SentencePiece hides it where a text begins
            spelled.append(token.strip(" ") if self.reads == "stripped" else token)
        of_tokens = [logp[t, label].item() for t, label in enumerate(ids[1:])]
        answer = {"token_logprobs": [None, *of_tokens, -0.5]}
        if self.reads != "offsets":
            answer["tokens"] = [*spelled, " the"]
        if self.reads in ("offsets", "both"):
            answer["text_offset"] = self.begins[tuple(ids)]
        return answer
