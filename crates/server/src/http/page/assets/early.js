// Sets the theme before the first paint. A plain script, because modules run only after it.
try {
  document.documentElement.dataset.theme = localStorage.getItem('clary.theme') || 'auto';
} catch {
  // A browser that keeps nothing gets the system's theme.
}
