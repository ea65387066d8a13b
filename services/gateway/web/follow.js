// Drives one reply to its end across lost connections: send once, then resume after the last event seen.
import { fold, isOver, stopped, whole } from "./reply.js";

const WAITS_MS = [250, 500, 1000, 2000, 4000]; // between tries; the last one repeats
const TRIES_MAX = 60;
const STOP_MS = 5000; // how long a stop may take before the page stops waiting for the reply's own end

/**
 * One reply being followed. `node.reply` is replaced at each event, and `changed()` called; `lost(true | false)` says
 * whether the connection is gone just now. `start(signal)` sends it and gives its events; null when it has been sent.
 */
export class Follower {
  #abort = new AbortController(); // of the whole
  #attempt = null; // of the connection that stands
  #stop = null; // the timer of a stop that was asked for

  constructor({ api, node, start, changed, lost }) {
    Object.assign(this, { api, node, start, changed, lost });
    this.stopping = false;
  }

  /** Resolves when the reply is over, or was let go; throws ApiError when it cannot go on. */
  async run() {
    const cut = () => this.#attempt?.abort();
    addEventListener("offline", cut);
    try {
      await this.#follow();
    } catch (error) {
      if (!this.#abort.signal.aborted) throw error;
    } finally {
      removeEventListener("offline", cut);
      clearTimeout(this.#stop);
      this.lost(false);
    }
  }

  /** The person has had enough. Works before the reply has an id, and while the network is away: it is cancelled once it can be. */
  stop() {
    if (this.stopping) return;
    this.stopping = true;
    this.#stop = setTimeout(() => this.#stopAnyway(), STOP_MS);
    if (this.node.reply.id) this.#cancel();
  }

  /** Nobody wants to see more of it here: another reply took its place, or the page is another's now. */
  letGo() {
    this.#abort.abort();
    this.#attempt?.abort();
  }

  async #follow() {
    let tries = 0;
    while (!isOver(this.node.reply)) {
      const before = this.node.reply.after;
      if (await this.#connect()) return;
      tries = this.node.reply.after === before ? tries + 1 : 0;
      if (tries >= TRIES_MAX) throw new Error("The connection could not be restored. Reload the page to try again.");
      this.lost(true);
      await pause(WAITS_MS[Math.min(tries, WAITS_MS.length - 1)], this.#abort.signal);
    }
  }

  /** One connection, from opening to its end. True when there is nothing more to come. */
  async #connect() {
    const attempt = (this.#attempt = new AbortController());
    const before = this.node.reply.after;
    try {
      for await (const event of this.#open(attempt.signal)) {
        this.lost(false);
        this.#take(event);
        if (isOver(this.node.reply)) return true;
      }
      if (this.node.reply.id && this.node.reply.after === before) return await this.#settle();
    } catch (error) {
      if (this.#abort.signal.aborted || (error.name !== "AbortError" && !error.passing)) throw error;
    }
    return false;
  }

  #open(signal) {
    const { id, after } = this.node.reply;
    return id ? this.api.resume({ replyId: id, after, signal }) : this.start(signal, this);
  }

  #take(event) {
    const { reply } = this.node;
    this.node.reply = isOver(reply) ? { ...reply, id: reply.id ?? event.replyId ?? null } : fold(reply, event);
    if (this.stopping && !reply.id && this.node.reply.id) this.#cancel();
    this.changed(this.node);
  }

  /** The stream had nothing more: the reply ended while we were away. */
  async #settle() {
    const response = await this.api.retrieve(this.node.reply.id);
    if (response.status === "queued" || response.status === "in_progress") return false;
    this.node.reply = whole(this.node.reply, response);
    this.changed(this.node);
    return true;
  }

  async #cancel() {
    for (let tries = 0; tries < TRIES_MAX; tries += 1) {
      try {
        return await this.api.stop(this.node.reply.id); // its stream then ends by itself, with what was written
      } catch (error) {
        if (!error.passing) return; // it has ended, or is gone: its stream says so
        await pause(WAITS_MS[2]);
      }
    }
  }

  #stopAnyway() {
    if (isOver(this.node.reply)) return;
    this.node.reply = stopped(this.node.reply);
    this.changed(this.node);
    if (this.node.reply.id) this.letGo();
  }
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(done, ms);
    addEventListener("online", done, { once: true });
    signal?.addEventListener("abort", fail, { once: true });
    function done() {
      clearTimeout(timer);
      removeEventListener("online", done);
      signal?.removeEventListener("abort", fail);
      resolve();
    }
    function fail() {
      done();
      reject(new DOMException("stopped", "AbortError"));
    }
  });
}
