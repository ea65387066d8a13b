// The page: wires what a person does to the chats, and what the chats say to the screen.
import { Api } from "./api.js";
import { Chats } from "./chats.js";
import { askRemove, askTitle, showKeys } from "./dialogs.js";
import { icon, make } from "./dom.js";
import { Announcer } from "./say.js";
import { Sidebar } from "./sidebar.js";
import { fit, stickToEnd, Thread } from "./thread.js";

const KEY_PLACE = "chorus.key";
const MODEL_PLACE = "chorus.model";
const LOOK_MS = 20_000; // how often a page that is looked at asks what other devices did
const IDEAS = ["Give three tips for sleeping well.", "How do I make a good cup of tea?", "Write a Python function that adds two numbers.", "Name the capital city of France."];
const THEMES = { null: ["auto", "Theme: as the system"], light: ["sun", "Theme: light"], dark: ["moon", "Theme: dark"] };
const $ = (id) => document.getElementById(id);

const channel = "BroadcastChannel" in window ? new BroadcastChannel("chorus") : null;
let chats = null;
const announcer = new Announcer($("said"));
const scrollToEnd = stickToEnd($("scroll"), (away) => ($("latest").hidden = !away));
const thread = new Thread($("talk"), {
  choose: (node) => chats.choose(node),
  edit: (node, text) => attempt(() => written(chats.edit(node, text, model()))),
  regenerate: (message) => attempt(() => written(chats.regenerate(message, model()))),
  again: (node) => attempt(() => written(chats.again(node, model()))),
});
const sidebar = new Sidebar({
  side: $("side"),
  list: $("list"),
  search: $("search"),
  older: $("older"),
  main: $("main"),
  shade: $("shade"),
  find: (search) => attempt(() => chats.find(search)),
  more: () => attempt(() => chats.findMore()),
});

// --- what the chats say ---

const CHANGES = {
  list: () => {
    sidebar.update(chats);
    showTitle();
  },
  opened: () => {
    history.replaceState(null, "", `#/${chats.tree.id}`);
    showTitle();
  },
  thread: showThread,
  reply: (node) => {
    thread.changed(node, () => {
      announcer.follow(node);
      scrollToEnd();
    });
    showBusy();
  },
  ended: (node) => {
    announcer.follow(node);
    if (node.reply.end === "complete") announcer.say("The reply is complete.");
    CHANGES.reply(node);
  },
  connection: () => {
    status(chats.connected ? "" : navigator.onLine ? "Connection lost. Reconnecting…" : "You are offline. This goes on when you are back.");
    if (chats.connected) announcer.say("Connected again.");
  },
};

function showThread() {
  const empty = !chats.tree.root.children.length;
  $("hello").hidden = !empty || chats.loading;
  $("loading").hidden = !empty || !chats.loading;
  thread.show(chats.tree);
  showTitle();
  showBusy();
  sidebar.update(chats);
  scrollToEnd();
}

function showTitle() {
  const title = chats.entry?.title || "New chat";
  if ($("title").textContent !== title) $("title").textContent = title;
  document.title = chats.entry?.title ? `${title} · Chorus` : "Chorus";
  $("menu").hidden = !chats.tree.id;
}

function showBusy() {
  const busy = chats.current !== null;
  if (busy === $("send").hidden) return;
  const focused = document.activeElement === $("stop");
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  if (focused) $("text").focus();
}

function status(sentence) {
  $("status").textContent = sentence;
  $("status").hidden = !sentence;
}

/** Does what may be refused; the sentence then stands over the message field. */
async function attempt(act) {
  try {
    status("");
    return await act();
  } catch (error) {
    status(error.message);
    return null;
  }
}

// --- what a person does ---

function send(event) {
  event?.preventDefault();
  const text = $("text").value.trim();
  if (!text || !chats) return;
  attempt(() => {
    written(chats.send(text, model()));
    $("text").value = "";
    typed();
  });
}

/** The model that was chosen; undefined (the server's default) while the list is on its way. */
const model = () => $("model").value || undefined;

function written() {
  scrollToEnd(true);
}

function typed() {
  fit($("text"));
  $("send").disabled = !$("text").value.trim();
}

/** Opens what the address names. */
async function go() {
  const id = /^#\/(conv_\w+)$/.exec(location.hash)?.[1] ?? null;
  if (id !== null && id === chats.tree.id && chats.tree.root.children.length) return;
  $("menu").open = false;
  try {
    const opening = chats.open(id);
    scrollToEnd(true);
    await opening;
    for (const node of chats.tree.path()) if (node.reply) announcer.skip(node);
    scrollToEnd(true);
  } catch (error) {
    if (error.status !== 404) throw error;
    newChat();
    status("This chat is not there any more.");
  }
}

function newChat() {
  if (location.hash) history.pushState(null, "", location.pathname);
  chats.open(null);
  sidebar.chosen();
  $("text").focus();
}

async function rename() {
  const title = await askTitle(chats.entry?.title ?? "");
  if (title !== null) attempt(() => chats.rename(chats.tree.id, title));
}

async function remove() {
  const { id } = chats.tree;
  if (!(await askRemove())) return;
  await attempt(() => chats.remove(id));
  if (chats.tree.id !== id) newChat();
}

async function download() {
  const file = URL.createObjectURL(await chats.api.export(chats.tree.id));
  make("a", { href: file, download: `${chats.tree.id}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(file), 10_000);
}

// --- keys, theme, wiring ---

function onKey(event) {
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  const act =
    key === "escape" && !document.querySelector("dialog[open]") ? stopByKey
    : command && key === "k" ? () => (sidebar.open(), $("search").focus())
    : command && event.shiftKey && key === "o" ? newChat
    : command && event.shiftKey && key === "s" ? () => sidebar.toggle()
    : command && key === "/" ? showKeys
    : null;
  if (!act || !chats) return;
  event.preventDefault();
  act();
}

function stopByKey() {
  $("menu").open = false;
  if (sidebar.narrow.matches && sidebar.isOpen) return sidebar.close();
  chats.stop();
}

function showTheme() {
  const [picture, label] = THEMES[window.chorusTheme.chosen()];
  $("theme").replaceChildren(icon(picture));
  $("theme").title = label;
  $("theme").setAttribute("aria-label", label);
}

function nextTheme() {
  const order = [null, "light", "dark"];
  window.chorusTheme.choose(order[(order.indexOf(window.chorusTheme.chosen()) + 1) % 3]);
  showTheme();
  announcer.say($("theme").title);
}

function wire() {
  $("ask").addEventListener("submit", send);
  $("text").addEventListener("input", typed);
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    if (event.key === "ArrowUp" && !$("text").value && thread.editLast()) event.preventDefault();
  });
  $("stop").addEventListener("click", () => chats.stop());
  $("latest").addEventListener("click", () => scrollToEnd(true));
  $("new").addEventListener("click", newChat);
  $("side-open").addEventListener("click", () => sidebar.open());
  $("side-close").addEventListener("click", () => sidebar.close());
  $("list").addEventListener("click", (event) => event.target.closest("a") && sidebar.chosen());
  $("theme").addEventListener("click", nextTheme);
  $("shortcuts").addEventListener("click", showKeys);
  $("rename").addEventListener("click", rename);
  $("remove").addEventListener("click", remove);
  $("export").addEventListener("click", () => attempt(download));
  $("menu").addEventListener("click", (event) => event.target.closest("div button") && ($("menu").open = false));
  $("model").addEventListener("change", () => localStorage.setItem(MODEL_PLACE, $("model").value));
  $("ideas").replaceChildren(...IDEAS.map((idea) => make("li", {}, make("button", { type: "button", onclick: () => (($("text").value = idea), send()) }, idea))));
  addEventListener("keydown", onKey);
  addEventListener("popstate", () => chats && attempt(go)); // also when only the part after the # changes
  addEventListener("click", (event) => $("menu").contains(event.target) || ($("menu").open = false));
  const look = () => chats && !document.hidden && navigator.onLine && !chats.current && chats.refresh().catch(() => {});
  document.addEventListener("visibilitychange", look);
  addEventListener("online", look);
  setInterval(look, LOOK_MS);
}

// --- the key ---

/** A key handed over in the address is kept in the browser; it must not stay in the address bar. */
function takeKeyFromUrl() {
  const key = /^#key=(.+)$/.exec(location.hash)?.[1];
  if (!key) return;
  localStorage.setItem(KEY_PLACE, decodeURIComponent(key));
  history.replaceState(null, "", location.pathname);
}

function askKey(wrong) {
  $("key-wrong").hidden = !wrong;
  $("key-form").onsubmit = () => {
    localStorage.setItem(KEY_PLACE, $("key-text").value.trim());
    $("key-text").value = "";
    begin();
  };
  $("key").oncancel = (event) => event.preventDefault(); // there is nothing to do here without one
  $("key").showModal();
}

function forget() {
  chats?.close();
  localStorage.removeItem(KEY_PLACE);
  location.replace(location.pathname);
}

function showModels(models) {
  const chosen = localStorage.getItem(MODEL_PLACE);
  $("model").replaceChildren(...models.map((model) => make("option", { value: model.id, title: model.note ?? "" }, model.id)));
  if (models.some((model) => model.id === chosen)) $("model").value = chosen;
}

async function begin() {
  const key = localStorage.getItem(KEY_PLACE);
  $("forget").hidden = !key;
  if (!key) return askKey(false);
  const api = new Api(key);
  chats = new Chats({ api, storage: sessionStorage, channel, changed: (what, node) => CHANGES[what](node) });
  for (let waitMs = 500; chats.api === api; waitMs = Math.min(waitMs * 2, 8000)) {
    try {
      await Promise.all([api.models().then(showModels), chats.find(), go()]);
      status("");
      return chats.resumePending();
    } catch (error) {
      if (error.status === 401) return refused();
      if (!error.passing) return status(`${error.message} Reload the page to try again.`);
      status(`${error.message} Trying again…`);
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }
}

function refused() {
  chats = null;
  localStorage.removeItem(KEY_PLACE);
  askKey(true);
}

wire();
showTheme();
takeKeyFromUrl();
typed();
$("text").focus({ preventScroll: true });
await begin();
