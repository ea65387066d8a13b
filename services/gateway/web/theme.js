// Light or dark before the first thing is painted: what the person chose, else what the system says. Not a module: it must not wait.
(() => {
  const PLACE = "chorus.theme"; // "light", "dark", or nothing: as the system
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem(PLACE);
  const apply = () => {
    const theme = chosen() ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    document.querySelector("meta[name=theme-color]").content = theme === "dark" ? "#151718" : "#fbfaf8";
  };
  dark.addEventListener("change", apply);
  addEventListener("storage", apply);
  window.chorusTheme = {
    chosen,
    choose(theme) {
      if (theme) localStorage.setItem(PLACE, theme);
      else localStorage.removeItem(PLACE);
      apply();
    },
  };
  apply();
})();
