// Keeps every part of a page up that says so: <section id="..." data-refresh="seconds"> is fetched again, from
// data-from or the page's own address, and replaced where it changed. Hidden pages rest.

export async function fetchPage(url) {
  const answer = await fetch(url, { headers: { Accept: "text/html" }, redirect: "error" });
  if (!answer.ok) throw new Error(answer.statusText);
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

async function refresh(id) {
  const page = await fetchPage(document.getElementById(id)?.dataset.from ?? location.href);
  const [now, next] = [document, page].map((each) => each.getElementById(id));
  if (now && next && !now.isEqualNode(next) && !now.contains(document.activeElement)) {
    now.replaceWith(document.adoptNode(next));
  }
}

function keepUp({ id, dataset }) {
  const failed = (error) => console.info(`not refreshed: ${error.message}`);
  setInterval(() => document.visibilityState === "visible" && refresh(id).catch(failed), 1000 * Number(dataset.refresh));
}

document.querySelectorAll("[data-refresh][id]").forEach(keepUp);
