// Checks the search space on the server while it is edited: its problems, or what it holds, replace those below it.
import { fetchPage } from "./dashboard.js";

const PAUSE = 600; // milliseconds without a key
const [space, trials] = ["space", "trials"].map((id) => document.getElementById(id));
const button = document.querySelector("button[formaction]");
let [timer, newest] = [0, 0];

async function check() {
  const [number, body] = [++newest, new FormData()];
  const sent = [space, space.form.elements.form_token, ...(/^\d+$/.test(trials.value) ? [trials] : [])];
  for (const { name, value } of sent) body.set(name, value);
  const page = await fetchPage(button.getAttribute("formaction"), { method: "POST", body });
  if (number !== newest) return; // the text has changed since
  document.getElementById("space-check").replaceChildren(...page.getElementById("space-check").childNodes);
  const wrong = page.getElementById("space").getAttribute("aria-invalid");
  wrong ? space.setAttribute("aria-invalid", wrong) : space.removeAttribute("aria-invalid");
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(() => check().catch((error) => console.info(`not checked: ${error.message}`)), PAUSE);
}

if (button) {
  for (const field of [space, trials]) field.addEventListener("input", later);
  if (space.value && !document.getElementById("space-check").textContent.trim()) later();
}
