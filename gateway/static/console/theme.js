// Light, dark, or as the system has it; what was chosen is remembered in this browser.

const NEXT = { system: "light", light: "dark", dark: "system" };
const STORE = "eyas-theme";

export function followTheme(button) {
  let theme = stored();
  const show = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}. Change to ${NEXT[theme]}`);
  };
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    try { localStorage.setItem(STORE, theme); } catch { /* a browser that keeps nothing */ }
    show();
  });
  show();
}

function stored() {
  try {
    const theme = localStorage.getItem(STORE);
    return theme in NEXT ? theme : "system";
  } catch {
    return "system";
  }
}
