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
