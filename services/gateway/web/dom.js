// Making elements. Text only ever becomes text nodes, so that nothing in it can run.

/** `make("button.quiet", {type: "button", onclick}, "Text", child)`: properties by name, attributes where there is none. */
export function make(what, properties = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** A picture of the sprite in the page, for the eye only. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS(SVG, "use"));
  svg.firstChild.setAttribute("href", `#i-${name}`);
  return svg;
}

/** A button that shows a picture and is called `label`. */
export function iconButton(name, label, onclick, className = "icon-button") {
  return make(`button.${className}`, { type: "button", title: label, "aria-label": label, onclick }, icon(name));
}

/** Puts `text` on the clipboard; also where the page came over plain HTTP and has no clipboard of its own. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text, readOnly: true });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** A button that copies what `text()` gives, and shows for a moment that it did. */
export function copyButton(label, text, className) {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    button.dataset.done = "";
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      delete button.dataset.done;
    }, 1500);
  }, className);
  return button;
}
