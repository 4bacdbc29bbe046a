// An image as a data: URL, made smaller where it has more pixels than models read.
const MAX_SIDE = 2048;
const MAX_BYTES = 1_500_000;

export async function readImage(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_BYTES && /png|jpeg|webp|gif/.test(file.type)) return urlOf(file);
  const canvas = new OffscreenCanvas(Math.round(bitmap.width * scale), Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return urlOf(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.9 }));
}

function urlOf(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = reject;
    reader.readAsDataURL(blob);
  });
}
