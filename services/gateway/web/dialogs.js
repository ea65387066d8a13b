// Small questions in front of the page: a name, a yes, and the list of keys. Each closes with Esc and gives the focus back.
import { make } from "./dom.js";

const $ = (id) => document.getElementById(id);
const command = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";

export const SHORTCUTS = [
  [["Enter"], "Send the message"],
  [["Shift", "Enter"], "New line"],
  [["Esc"], "Stop the reply"],
  [["↑"], "In an empty field: edit the last message"],
  [[command, "K"], "Search chats"],
  [[command, "Shift", "O"], "New chat"],
  [[command, "Shift", "S"], "Show or hide the chats"],
  [[command, "/"], "These shortcuts"],
];

/** Asks in a dialog; resolves to true when its form was sent, false when it was closed. */
function ask(dialog) {
  for (const button of dialog.querySelectorAll("[data-close]")) button.onclick = () => dialog.close("");
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.querySelector("form").onsubmit = () => (dialog.sent = true);
    dialog.onclose = () => {
      resolve(Boolean(dialog.sent));
      dialog.sent = false;
    };
    dialog.showModal();
  });
}

/** The new title, or null. An empty one brings the automatic title back. */
export async function askTitle(title) {
  $("rename-text").value = title;
  const asked = ask($("rename-box"));
  $("rename-text").select();
  return (await asked) ? $("rename-text").value.trim() : null;
}

export const askRemove = () => ask($("remove-box"));

export function showKeys() {
  const list = SHORTCUTS.flatMap(([keys, what]) => [make("dt", {}, ...keys.map((key) => make("kbd", {}, key))), make("dd", {}, what)]);
  $("keys-list").replaceChildren(...list);
  return ask($("keys-box"));
}
