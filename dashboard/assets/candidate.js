import { fetchPage } from "./dashboard.js";

// Buttons with data-copy="ID" copy that element's text to the clipboard.
const copy = async (id) => navigator.clipboard.writeText(document.getElementById(id).textContent);
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-copy]");
  const show = (text) => () => { button.textContent = text; };
  if (button) copy(button.dataset.copy).then(show("Copied"), show("The browser refused: copy it yourself"));
});

// Parts with data-load="URL" are fetched when they become visible; if that fails, they stay as they are.
const visible = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((each) => each.isIntersecting)) {
    visible.unobserve(target);
    fetchPage(target.dataset.load).then((page) => {
      target.replaceChildren(...page.body.childNodes);
      document.dispatchEvent(new CustomEvent("refreshed"));
    }).catch((error) => console.info(`not loaded: ${error.message}`));
  }
});
document.querySelectorAll("[data-load]").forEach((part) => visible.observe(part));
