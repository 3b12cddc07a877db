// Shows the times of a page in the reader's zone and language; without this script they are in UTC.
const now = new Date();
for (const each of document.querySelectorAll('time')) {
  const at = new Date(each.dateTime);
  if (Number.isNaN(at.getTime())) continue; // not a valid time
  const isToday = at.toDateString() === now.toDateString();
  const isThisYear = at.getFullYear() === now.getFullYear();
  each.title = each.textContent;
  each.textContent = at.toLocaleString([], {
    hour: 'numeric',
    minute: '2-digit',
    second: each.dateTime.length > '2026-11-22T14:20Z'.length ? '2-digit' : undefined,
    ...(!isToday && { day: 'numeric', month: 'short', year: isThisYear ? undefined : 'numeric' })
  });
}
