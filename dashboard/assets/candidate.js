import { fetchPage } from "./dashboard.js";

// Buttons with data-copy="ID" put that element's text on the clipboard, and say so for a moment.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it by hand: the browser refuses";
  }
  setTimeout(() => { button.textContent = label; }, 2000);
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
