// Pictures on their way into a message: dropped, pasted or picked, if the model can see.

const TYPES = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];
const BYTES_MAX = 20 * 1024 * 1024;
const COUNT_MAX = 32;

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** Why a file cannot go into a message that has `count` pictures, or null. */
export function refusal(file, count, canSee) {
  if (!canSee) return 'This server cannot see pictures: its model has no vision tower, or vision is off.';
  if (!TYPES.includes(file.type))
    return `${file.name || 'This file'} is not a PNG, JPEG, WebP or GIF picture.`;
  if (file.size > BYTES_MAX) return `${file.name || 'This picture'} is larger than 20 MiB.`;
  if (count >= COUNT_MAX) return `A message takes at most ${COUNT_MAX} pictures.`;
  return null;
}

/** Data URLs of the files that can be sent, and the first reason why one cannot. */
export async function readPictures(files, count, canSee) {
  const urls = [];
  let problem = null;
  for (const file of files) {
    const refused = refusal(file, count + urls.length, canSee);
    if (refused) problem ??= refused;
    else urls.push(await dataUrl(file));
  }
  return { urls, problem };
}

/** Files of a drop or paste. */
export function filesOf(transfer) {
  return [...(transfer?.files ?? [])];
}
