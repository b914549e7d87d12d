// A row of small squares, each for one thing or for several, in the order of their kinds.

import { count } from "./format.js";

// More squares than this say no more to the eye.
const MAX_CELLS = 256;

/**
 * Draws `parts`, each { kind, n, label }, into `element`; `noun` is what is counted.
 *
 * A square that stands for several things shows the first kind among them, so that one held block is seen beside
 * thousands of free ones. Where on the device a block lies nobody tells: the order is by kind.
 */
export function drawCells(element, legend, parts, noun) {
  const total = parts.reduce((sum, { n }) => sum + n, 0);
  const perCell = Math.max(1, Math.ceil(total / MAX_CELLS));
  const nCells = Math.ceil(total / perCell);
  while (element.children.length > nCells) element.lastChild.remove();
  while (element.children.length < nCells) element.append(document.createElement("span"));
  let part = 0;
  let end = parts[0].n;
  for (let cell = 0; cell < nCells; cell += 1) {
    while (end <= cell * perCell) {
      part += 1;
      end += parts[part].n;
    }
    if (element.children[cell].className !== parts[part].kind) element.children[cell].className = parts[part].kind;
  }
  const told = parts.map(({ n, label }) => `${count(n)} ${label}`).join(", ");
  element.setAttribute("aria-label", `${told} of ${count(total)} ${noun}`);
  if (!legend.children.length) legend.append(...parts.map(entry), document.createElement("span"));
  parts.forEach(({ n, label }, index) => {
    legend.children[index].lastChild.textContent = `${count(n)} ${label}`;
  });
  legend.lastChild.textContent = perCell > 1 ? `a square is ${perCell} ${noun}` : "";
}

function entry({ kind }) {
  const made = document.createElement("span");
  const square = document.createElement("i");
  square.className = kind;
  made.append(square, document.createTextNode(""));
  return made;
}
