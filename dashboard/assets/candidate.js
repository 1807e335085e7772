import { fetchPage } from "./dashboard.js";

// Buttons with data-copy="ID" put that element's text on the clipboard, and say so.
const copy = async (id) => navigator.clipboard.writeText(document.getElementById(id).textContent);
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-copy]");
  const told = (text) => () => { button.textContent = text; };
  if (button) copy(button.dataset.copy).then(told("Copied"), told("Select it by hand: the browser refuses"));
});

// Parts with data-load="URL" are fetched when they come into sight; until then, and where that fails, they stay.
const inSight = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((each) => each.isIntersecting)) {
    inSight.unobserve(target);
    fetchPage(target.dataset.load).then((page) => target.replaceChildren(...page.body.childNodes))
      .catch((error) => console.info(`not loaded: ${error.message}`));
  }
});
document.querySelectorAll("[data-load]").forEach((part) => inSight.observe(part));
