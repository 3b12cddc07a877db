// The theme of the Hub's pages: the one chosen there (same key as its darkmode.js), else the system's.
const KEY = 'jupyterhub-bs-theme';
const dark = matchMedia('(prefers-color-scheme: dark)');
const chosen = () => {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage is switched off
  }
};
const show = () => {
  const theme = chosen();
  const isDark = theme === 'dark' || (theme !== 'light' && dark.matches);
  document.documentElement.dataset.bsTheme = isDark ? 'dark' : 'light';
};
show();
dark.addEventListener('change', show);
addEventListener('storage', show); // chosen in another tab
addEventListener('DOMContentLoaded', () => {
  document.getElementById('dark-theme-toggle').addEventListener('click', () => {
    const theme = document.documentElement.dataset.bsTheme === 'dark' ? 'light' : 'dark';
    document.documentElement.dataset.bsTheme = theme;
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // the choice holds for this page only
    }
  });
});
