// Server-sent events from a fetch body. EventSource cannot send an Authorization header, so we read the stream ourselves.

const SILENCE_MS = 25_000; // the server says something every 10 s; past this the connection is dead, whatever the system thinks

/** Incremental parser: feed text, get whole events {id, event, data}. Comments and retry lines are skipped. */
export class SseParser {
  #rest = "";
  #event = { id: null, event: "message", data: [] };

  feed(text) {
    const events = [];
    this.#rest += text;
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line, events);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#event.data.length) {
        events.push({ id: this.#event.id, event: this.#event.event, data: this.#event.data.join("\n") });
      }
      this.#event = { id: null, event: "message", data: [] };
      return;
    }
    if (line.startsWith(":")) return;
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#event.data.push(value);
    else if (field === "event") this.#event.event = value;
    else if (field === "id") this.#event.id = value;
  }
}

/** The events of a streaming response, until it closes. Throws when nothing at all comes for SILENCE_MS. */
export async function* readEvents(body) {
  const parser = new SseParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await within(SILENCE_MS, reader.read());
      if (done) return;
      yield* parser.feed(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function within(ms, promise) {
  let timer;
  const late = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error("silence")), ms)));
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}
