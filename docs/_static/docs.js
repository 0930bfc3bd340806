/* Fits embedded timelines to their content, and lets them and the toolkit's own outputs follow the page's theme. */
const theme = () => (document.documentElement.dataset.theme === "dark" ? "tk-dark" : "tk-light");

function dress(body) {
  body.classList.remove("tk-dark", "tk-light");
  body.classList.add(theme());
  body.ownerDocument.documentElement.style.colorScheme = theme().slice(3); // of an iframe: else its ground is white
}

function adopt(frame) {
  const page = frame.contentDocument;
  if (!page || !page.body || !page.querySelector(".tk-page")) return;
  dress(page.body);
  const fit = () => { frame.style.height = `${Math.ceil(page.querySelector(".tk-page").getBoundingClientRect().height) + 4}px`; };
  new ResizeObserver(fit).observe(page.querySelector(".tk-page"));
  fit();
}

document.addEventListener("DOMContentLoaded", () => {
  const frames = [...document.querySelectorAll("iframe.tk-frame")];
  for (const frame of frames) {
    adopt(frame);
    frame.addEventListener("load", () => adopt(frame));
  }
  const follow = () => {
    dress(document.body);
    for (const frame of frames) if (frame.contentDocument?.body) dress(frame.contentDocument.body);
  };
  follow();
  new MutationObserver(follow).observe(document.documentElement, { attributeFilter: ["data-theme"] });
});
