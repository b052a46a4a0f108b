// Loaded before anything is drawn, so that a chosen theme does not flash. Without a choice the system's counts.
const chosen = localStorage.getItem("bayeslora-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
