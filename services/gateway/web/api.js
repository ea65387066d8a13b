// The gateway's doors, as the page uses them. Every failure is an ApiError with a sentence for a person.
import { readEvents } from "./sse.js";

/** `status` is the HTTP status, 0 when the network failed; `retryAfterS` when the server said one. */
export class ApiError extends Error {
  constructor(message, status, code, retryAfterS) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
  /** Worth trying again by itself: the network or a server on its way back. */
  get passing() {
    return this.status === 0 || this.status === 502 || this.status === 503;
  }
}

export class Api {
  constructor(key) {
    this.key = key;
  }

  async models() {
    return (await this.#json("GET", "/v1/models")).data;
  }

  async stop(replyId) {
    return this.#json("POST", `/v1/responses/${replyId}/cancel`);
  }

  async retrieve(replyId) {
    return this.#json("GET", `/v1/responses/${replyId}`);
  }

  /** Starts a reply. The idempotency key makes a repeated send attach to the reply already being written. */
  send({ model, text, previous, idempotencyKey, signal }) {
    const body = { model, input: text, stream: true };
    if (previous) body.previous_response_id = previous;
    return this.#events("POST", "/v1/responses", { body, signal, headers: { "Idempotency-Key": idempotencyKey } });
  }

  /** Follows a reply after event number `after` (null: from its beginning). */
  resume({ replyId, after, signal }) {
    const headers = after === null ? {} : { "Last-Event-ID": String(after) };
    return this.#events("GET", `/v1/responses/${replyId}?stream=true`, { signal, headers });
  }

  async *#events(method, path, { body, signal, headers }) {
    const response = await this.#fetch(method, path, { body, signal, headers });
    if (response.status === 204) return;
    try {
      for await (const event of readEvents(response.body)) yield { id: event.id, ...JSON.parse(event.data) };
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection was lost.", 0, "network");
    }
  }

  async #json(method, path, body) {
    return (await this.#fetch(method, path, { body })).json();
  }

  async #fetch(method, path, { body, signal, headers = {} } = {}) {
    const init = { method, signal, headers: { Authorization: `Bearer ${this.key}`, ...headers } };
    if (body !== undefined) {
      init.body = JSON.stringify(body);
      init.headers["Content-Type"] = "application/json";
    }
    let response;
    try {
      response = await fetch(path, init);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.", 0, "network");
    }
    if (response.ok) return response;
    const said = await response.json().catch(() => ({}));
    const retry = Number(response.headers.get("Retry-After")) || null;
    throw new ApiError(said.error?.message ?? `The server answered ${response.status}.`, response.status, said.error?.code, retry);
  }
}
