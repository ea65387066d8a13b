// What the page knows of one reply: a fold of its events. Pure: no DOM, no network, no clock.

const ENDED = {
  "response.completed": "complete",
  "response.incomplete": "incomplete",
  "response.failed": "failed",
};

/** A reply before anything was heard of it. `after` is the last event number seen, as Last-Event-ID wants it. */
export function newReply() {
  return { id: null, text: "", status: "waiting", after: null, notice: "", reason: "" };
}

/** The reply after `event`. Events already seen (a resume may overlap) change nothing. */
export function fold(reply, event) {
  const number = Number(event.sequence_number ?? event.id);
  if (Number.isFinite(number)) {
    if (reply.after !== null && number <= reply.after) return reply;
    reply = { ...reply, after: number };
  }
  switch (event.type) {
    case "response.created":
      return { ...reply, id: event.response.id };
    case "response.queued":
      return { ...reply, notice: queuedNotice(event.response?.metadata ?? {}) };
    case "response.in_progress":
      return { ...reply, status: "writing", notice: "" };
    case "response.output_text.delta":
      return { ...reply, status: "writing", notice: "", text: reply.text + event.delta };
    case "response.output_text.done":
      return { ...reply, text: event.text };
    case "error":
      return { ...reply, status: "failed", reason: event.message ?? "The reply failed." };
    default:
      return event.type in ENDED ? ended(reply, event) : reply;
  }
}

function ended(reply, event) {
  const response = event.response ?? {};
  const cancelled = response.status === "cancelled";
  return {
    ...reply,
    status: cancelled ? "stopped" : ENDED[event.type],
    notice: "",
    reason: response.error?.message ?? response.incomplete_details?.reason ?? "",
  };
}

function queuedNotice(metadata) {
  const eta = Number(metadata.eta_s);
  if (metadata.position && Number.isFinite(eta)) return `Waiting: place ${metadata.position}, about ${Math.ceil(eta)} s`;
  if (metadata.position) return `Waiting: place ${metadata.position}`;
  return "Waiting for a free place";
}

export const isOver = (reply) => ["complete", "incomplete", "failed", "stopped"].includes(reply.status);

/** The sentence under a reply that did not simply end. */
export function ending(reply) {
  if (reply.status === "stopped") return "You stopped this reply.";
  if (reply.status === "failed") return reply.reason || "This reply failed. Send the message again.";
  if (reply.reason === "content_filter") return "This reply was withdrawn by the content filter.";
  if (reply.reason === "max_output_tokens") return "The reply reached its length limit.";
  return "";
}
