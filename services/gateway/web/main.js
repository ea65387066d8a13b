// The page: wires the conversation, the API and the view. One reply is followed at a time.
import { Api, ApiError } from "./api.js";
import { follow } from "./follow.js";
import { isOver } from "./reply.js";
import { Talk } from "./talk.js";
import { stickToEnd, TurnView } from "./view.js";

const KEY_PLACE = "chorus.key";
const $ = (id) => document.getElementById(id);
const talk = new Talk(localStorage);
const scrollToEnd = stickToEnd($("talk"));
let api = null;
let current = null; // {turn, abort, view} while a reply is followed

function takeKeyFromUrl() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  localStorage.setItem(KEY_PLACE, key);
  history.replaceState(null, "", location.pathname); // the key must not stay in the address bar
}

async function useKey() {
  const key = localStorage.getItem(KEY_PLACE);
  $("forget").hidden = !key;
  if (!key) return $("key").showModal();
  api = new Api(key);
  try {
    showModels(await api.models());
    say("");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      localStorage.removeItem(KEY_PLACE);
      say("That key is not valid.");
      return $("key").showModal();
    }
    say(error.message);
  }
}

function showModels(models) {
  const before = $("model").value;
  $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === before)) $("model").value = before;
}

const say = (sentence) => ($("status").textContent = sentence);

function show(turn) {
  const view = new TurnView(turn);
  $("talk").append(view.root);
  return view;
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
}

async function run(turn, view) {
  const abort = new AbortController();
  current = { turn, abort, view };
  busy(true);
  try {
    await follow({
      api,
      turn,
      signal: abort.signal,
      changed: () => {
        talk.save();
        view.update();
        scrollToEnd();
        say("");
      },
      lost: say,
    });
    say(turn.reply.status === "complete" ? "Reply complete." : "");
  } catch (error) {
    if (error.name !== "AbortError") fail(turn, view, error);
  } finally {
    current = null;
    busy(false);
    talk.save();
    $("text").focus();
  }
}

function fail(turn, view, error) {
  const when = error.retryAfterS ? ` Try again in about ${error.retryAfterS} s.` : "";
  turn.reply = { ...turn.reply, status: "failed", reason: error.message + when };
  view.update();
}

async function stop() {
  const { turn, abort } = current ?? {};
  if (!turn) return;
  $("stop").disabled = true;
  try {
    if (turn.reply.id) await api.stop(turn.reply.id); // its stream then ends by itself, with what was written
    else abort.abort();
  } catch (error) {
    say(error.message);
  } finally {
    $("stop").disabled = false;
  }
}

function send(event) {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || current || !api) return;
  $("text").value = "";
  const turn = talk.add(text, $("model").value, crypto.randomUUID());
  const view = show(turn);
  scrollToEnd(true);
  run(turn, view);
}

function newChat() {
  current?.abort.abort();
  talk.clear();
  $("talk").replaceChildren();
  $("text").focus();
}

function wire() {
  $("ask").addEventListener("submit", send);
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", newChat);
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  $("key-form").addEventListener("submit", () => {
    localStorage.setItem(KEY_PLACE, $("key-text").value.trim());
    $("key-text").value = "";
    useKey();
  });
  $("forget").addEventListener("click", () => {
    localStorage.removeItem(KEY_PLACE);
    useKey();
  });
}

wire();
takeKeyFromUrl();
const views = talk.turns.map(show);
scrollToEnd(true);
await useKey();
const left = talk.unfinished();
if (left && api && !isOver(left.reply)) run(left, views.at(-1));
