"""A listed picture becomes what the encoders read: pixels of its bucket, caption, mask."""

from typing import NamedTuple

import numpy as np

from fluxray.config.encode import EncodeConfig
from fluxray.data.captions import settled
from fluxray.data.crops import Bucket, Crop, choose_crop, cut, fit
from fluxray.data.decode import Quarantined, decode, decode_mask
from fluxray.data.pictures import Loaded, PictureRef, Pictures


class Prepared(NamedTuple):
    """A picture that is ready to be encoded.

    `pixels` are uint8 [H, W, 3], the crop's height and width. `mask` is uint8 [H, W], 255 where the loss counts in full; None
    where the picture has none. `size` is (width, height) of the upright picture before. `notes` tell what was done to it.
    """

    key: str
    caption: str
    pixels: np.ndarray
    crop: Crop
    size: tuple[int, int]
    notes: tuple[str, ...]
    mask: np.ndarray | None = None


def prepare_picture(pictures: Pictures, ref: PictureRef, config: EncodeConfig, data: Loaded | None = None) -> Prepared:
    """Return a picture, cut to the bucket of its reference, or by default to the one that fits it best; raises Quarantined.

    `data` are its bytes where they were streamed; otherwise they are loaded. A picture without a mask, where `encode.mask` asks
    for one, counts in full; one whose crop a mask leaves nothing of is Quarantined.
    """
    caption = settled(ref.caption, ref.fault, config.no_caption)
    if isinstance(data, Quarantined):
        raise data
    image, notes, mask = decode(pictures.load(ref) if data is None else data, config)
    if config.mask == "file" and ref.mask is not None:
        mask = decode_mask(pictures.load_mask(ref), config, image.size)
    elif config.mask != "none" and mask is None:
        notes = (*notes, "no mask: counts in full")
    crop = choose_crop(image.size, config) if ref.bucket is None else fit(image.size, Bucket(*ref.bucket))
    pixels = cut(image, crop)
    shown = None if mask is None else cut(mask, crop)
    if shown is not None and not shown.any():
        raise Quarantined("mask empty", "no pixel of the crop counts")
    return Prepared(ref.key, caption, pixels, crop, image.size, (*ref.notes, *notes), shown)
