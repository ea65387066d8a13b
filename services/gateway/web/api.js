// The gateway's doors, as the page uses them. Every failure is an ApiError with a sentence for a person.
import { readEvents } from "./sse.js";

const SAMPLING = { temperature: 0.3, top_p: 0.9 }; // small models wander at the API's defaults
const ANSWER_MS = 20_000; // for answers that are no stream
const PAGE = 100;
const PAGES_MAX = 20; // of one conversation's items

/** `status` is the HTTP status, 0 when the network failed; `retryAfterS` when the server said one. */
export class ApiError extends Error {
  constructor(message, status, code = null, retryAfterS = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
  /** Worth trying again by itself: the network or a server on its way back; a full lane says so to the person. */
  get passing() {
    return this.status === 0 || this.status === 502 || (this.status === 503 && this.code !== "lane_full");
  }
}

export class Api {
  constructor(key) {
    this.key = key;
  }

  async models() {
    return (await this.#json("GET", "/v1/models")).data;
  }

  // --- conversations ---

  conversations({ search, after }) {
    const query = new URLSearchParams({ limit: "30" });
    if (search) query.set("search", search);
    if (after) query.set("after", after);
    return this.#json("GET", `/v1/conversations?${query}`);
  }

  conversation(id) {
    return this.#json("GET", `/v1/conversations/${id}`);
  }

  create() {
    return this.#json("POST", "/v1/conversations", {});
  }

  change(id, fields) {
    return this.#json("POST", `/v1/conversations/${id}`, fields);
  }

  remove(id) {
    return this.#json("DELETE", `/v1/conversations/${id}`);
  }

  async export(id) {
    return (await this.#fetch("GET", `/v1/conversations/${id}/export`)).blob();
  }

  /** Every item of every branch, oldest first. */
  async items(id) {
    const items = [];
    for (let page = 0; page < PAGES_MAX; page += 1) {
      const query = new URLSearchParams({ include: "branches", order: "asc", limit: String(PAGE) });
      if (items.length) query.set("after", items.at(-1).id);
      const { data, has_more: more } = await this.#json("GET", `/v1/conversations/${id}/items?${query}`);
      items.push(...data);
      if (!more || !data.length) break;
    }
    return items;
  }

  // --- replies ---

  stop(replyId) {
    return this.#json("POST", `/v1/responses/${replyId}/cancel`);
  }

  retrieve(replyId) {
    return this.#json("GET", `/v1/responses/${replyId}`);
  }

  /** Starts a reply. The idempotency key makes a repeated send attach to the reply already being written. */
  send({ conversation, follows, model, text, sendKey, signal }) {
    const body = { model, input: text, stream: true, conversation, branch_from: follows ?? "root", ...SAMPLING };
    return this.#events("POST", "/v1/responses", { body, signal, headers: { "Idempotency-Key": sendKey } });
  }

  /** Another reply to the message that `replyId` answers. */
  regenerate({ conversation, replyId, model, sendKey, signal }) {
    const body = { response_id: replyId, model, stream: true };
    const path = `/v1/conversations/${conversation}/regenerate`;
    return this.#events("POST", path, { body, signal, headers: { "Idempotency-Key": sendKey } });
  }

  /** Follows a reply after event number `after` (null: from its beginning). */
  resume({ replyId, after, signal }) {
    const headers = after === null ? {} : { "Last-Event-ID": String(after) };
    return this.#events("GET", `/v1/responses/${replyId}?stream=true`, { signal, headers });
  }

  // --- the wire ---

  /** First `chorus.reply` with the reply's id, as soon as the answer begins; then what the stream holds. */
  async *#events(method, path, { body, signal, headers }) {
    const response = await this.#fetch(method, path, { body, signal, headers });
    const replyId = response.headers.get("x-chorus-reply");
    if (replyId) yield { type: "chorus.reply", replyId };
    if (response.status === 204) return;
    try {
      for await (const event of readEvents(response.body)) yield { id: event.id, ...JSON.parse(event.data) };
    } catch (error) {
      if (signal?.aborted) throw new DOMException("stopped", "AbortError");
      throw new ApiError("The connection was lost.", 0, "network");
    }
  }

  async #json(method, path, body) {
    return (await this.#fetch(method, path, { body, signal: AbortSignal.timeout(ANSWER_MS) })).json();
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
