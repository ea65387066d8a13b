// What the page knows of one reply: a fold of its events. Pure: no DOM, no network, no clock.
//
//   status   waiting -> queued -> writing -> over
//   end      why it is over: complete | length | stopped | superseded | idle | filtered | failed

const ENDS = {
  // end_reason of a stored item, and incomplete_details.reason of a response
  stop_token: "complete",
  stop_sequence: "complete",
  max_tokens: "length",
  max_output_tokens: "length",
  user_stop: "stopped",
  superseded: "superseded",
  idle: "idle",
  safety: "filtered",
  content_filter: "filtered",
  failed: "failed",
  expired: "failed",
};
const OF_STATUS = { completed: "complete", incomplete: "length", cancelled: "stopped", failed: "failed" };
const LAST = new Set(["response.completed", "response.incomplete", "response.failed"]);

/** A reply before anything was heard of it. `after` is the last event number seen, as Last-Event-ID wants it. */
export function newReply(id = null) {
  return { id, text: "", status: "waiting", end: null, after: null, queue: null, model: null, fallback: "", problem: "", retryAt: null };
}

/** The reply after `event`. Events already seen (a resume may overlap) change nothing. */
export function fold(reply, event) {
  if (event.type === "chorus.reply") return { ...reply, id: event.replyId };
  const number = Number(event.sequence_number ?? event.id ?? NaN);
  if (Number.isFinite(number)) {
    if (reply.after !== null && number <= reply.after) return reply;
    reply = { ...reply, after: number };
  }
  switch (event.type) {
    case "response.created":
      return { ...reply, ...about(event.response) };
    case "response.queued":
      return { ...reply, status: "queued", queue: place(event.response?.metadata ?? {}) };
    case "response.in_progress":
      return { ...reply, status: "writing", queue: null };
    case "response.output_text.delta":
      return { ...reply, status: "writing", queue: null, text: reply.text + event.delta };
    case "response.output_text.done":
      return { ...reply, text: event.text };
    case "error":
      return failed(reply, event.message ?? "The reply failed.");
    default:
      return LAST.has(event.type) ? over({ ...reply, ...about(event.response) }, event.response) : reply;
  }
}

function about(response) {
  const { requested_model: asked, notice } = response.metadata ?? {};
  return { id: response.id, model: response.model ?? null, fallback: asked ? (notice ?? "") : "" };
}

/** A reply that ended, from its response object. */
export function over(reply, response) {
  const said = response.incomplete_details?.reason;
  return {
    ...reply,
    status: "over",
    end: ENDS[said] ?? OF_STATUS[response.status] ?? "failed",
    queue: null,
    problem: response.error?.message ?? "",
  };
}

/** The same, with the text that the response object holds. */
export function whole(reply, response) {
  const text = (response.output ?? []).flatMap((item) => item.content ?? []).map((part) => part.text ?? "").join("");
  return over({ ...reply, ...about(response), text }, response);
}

/** A reply as a conversation's item has it; one that still runs has no text there and is to be followed. */
export function ofItem(item, text) {
  const running = item.status === "in_progress";
  const reply = { ...newReply(item.response_id ?? null), model: item.model ?? null, fallback: item.notice ?? "" };
  return running ? reply : { ...reply, text, status: "over", end: ENDS[item.end_reason] ?? "complete" };
}

/** `retryAt`: when it may be tried again, in the caller's milliseconds, or null for at once. */
export function failed(reply, problem, retryAt = null) {
  return { ...reply, status: "over", end: "failed", queue: null, problem, retryAt };
}

export function stopped(reply) {
  return { ...reply, status: "over", end: "stopped", queue: null };
}

function place({ position, eta_s: eta }) {
  const seconds = Number(eta ?? NaN);
  return { position: Number(position) || null, etaS: Number.isFinite(seconds) ? Math.max(1, Math.ceil(seconds)) : null };
}

export const isOver = (reply) => reply.status === "over";

const ENDINGS = {
  length: "The reply reached its length limit.",
  stopped: "You stopped this reply.",
  superseded: "Stopped: a newer reply took its place.",
  idle: "Stopped: nobody was listening any more.",
  filtered: "This reply was stopped by the content filter.",
};

/** The sentence under a reply that waits or did not simply end; empty when there is nothing to say. */
export function note(reply) {
  if (reply.status === "queued") return queued(reply.queue);
  if (reply.end === "failed") return reply.problem || "This reply failed. Try it again.";
  return ENDINGS[reply.end] ?? "";
}

function queued({ position, etaS }) {
  const where = position ? `You are number ${position} in line` : "Waiting for a free place";
  return etaS === null ? `${where}.` : `${where}: about ${duration(etaS)}.`;
}

/** Seconds as a person says them. */
export function duration(seconds) {
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.round(minutes / 60)} h`;
}
