// Drives one reply to its end across lost connections: send once, then resume after the last event seen.
import { fold, isOver } from "./reply.js";

const WAITS_MS = [250, 500, 1000, 2000, 4000]; // between tries; the last one repeats
const TRIES_MAX = 60;

/**
 * Follows `turn` until its reply is over, calling `changed()` after each event and `lost(sentence)` while reconnecting.
 * Throws ApiError when it cannot go on; throws AbortError when `signal` fires.
 */
export async function follow({ api, turn, signal, changed, lost }) {
  let tries = 0;
  while (!isOver(turn.reply)) {
    const before = turn.reply.after;
    try {
      for await (const event of open(api, turn, signal)) {
        turn.reply = fold(turn.reply, event);
        changed();
        if (isOver(turn.reply)) return;
      }
      if (turn.reply.after === before && turn.reply.id) return await settle(api, turn, changed);
    } catch (error) {
      if (error.name === "AbortError" || !error.passing) throw error;
    }
    tries = turn.reply.after === before ? tries + 1 : 0;
    if (tries >= TRIES_MAX) throw new Error("The connection could not be restored. Reload to try again.");
    lost("Connection lost. Reconnecting…");
    await pause(WAITS_MS[Math.min(tries, WAITS_MS.length - 1)], signal);
  }
}

function open(api, turn, signal) {
  const { id, after } = turn.reply;
  if (id) return api.resume({ replyId: id, after, signal });
  return api.send({ model: turn.model, text: turn.text, previous: turn.previous, idempotencyKey: turn.sendKey, signal });
}

/** The stream had nothing more: the reply ended while we were away. */
async function settle(api, turn, changed) {
  const response = await api.retrieve(turn.reply.id);
  const type = response.status === "completed" ? "response.completed" : response.status === "failed" ? "response.failed" : "response.incomplete";
  const text = (response.output ?? []).flatMap((item) => item.content ?? []).map((part) => part.text ?? "").join("");
  turn.reply = fold({ ...turn.reply, text }, { type, response });
  changed();
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(done, ms);
    addEventListener("online", done, { once: true });
    signal?.addEventListener("abort", stop, { once: true });
    function done() {
      clearTimeout(timer);
      removeEventListener("online", done);
      resolve();
    }
    function stop() {
      done();
      reject(new DOMException("stopped", "AbortError"));
    }
  });
}
