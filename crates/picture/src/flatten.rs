//! Every colour type to opaque 8-bit RGB.

use image::DynamicImage;

/// 16 bits to 8, to the nearest.
fn narrow(value: u16) -> u8 {
    ((u32::from(value) + 128) / 257) as u8
}

/// `color` with `alpha` over `under`, to the nearest.
fn over(color: u8, alpha: u8, under: u8) -> u8 {
    let (color, alpha, under) = (u32::from(color), u32::from(alpha), u32::from(under));
    ((color * alpha + under * (255 - alpha) + 127) / 255) as u8
}

/// `[height, width, 3]` bytes of the picture over `background`.
pub(crate) fn flatten(image: DynamicImage, background: [u8; 3]) -> Vec<u8> {
    let blend = |rgb: [u8; 3], alpha: u8| [0, 1, 2].map(|c| over(rgb[c], alpha, background[c]));
    let rgba = |[r, g, b, a]: [u8; 4]| blend([r, g, b], a);
    match image {
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageLuma8(image) => image.as_raw().iter().flat_map(|&l| [l; 3]).collect(),
        DynamicImage::ImageLumaA8(image) => image.pixels().flat_map(|p| blend([p.0[0]; 3], p.0[1])).collect(),
        DynamicImage::ImageRgba8(image) => image.pixels().flat_map(|p| rgba(p.0)).collect(),
        DynamicImage::ImageLuma16(image) => image.as_raw().iter().flat_map(|&l| [narrow(l); 3]).collect(),
        DynamicImage::ImageLumaA16(image) => {
            image.pixels().map(|p| p.0.map(narrow)).flat_map(|[l, a]| blend([l; 3], a)).collect()
        }
        DynamicImage::ImageRgb16(image) => image.as_raw().iter().map(|&c| narrow(c)).collect(),
        DynamicImage::ImageRgba16(image) => image.pixels().flat_map(|p| rgba(p.0.map(narrow))).collect(),
        // None of the four formats gives another type.
        other => other.into_rgb8().into_raw(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_round_to_the_nearest_level() {
        for value in 0..=u16::MAX {
            let exact = f64::from(value) * 255.0 / 65535.0;
            assert!((f64::from(narrow(value)) - exact).abs() <= 0.5, "{value}");
        }
    }

    #[test]
    fn alpha_blends_to_the_nearest_level() {
        for alpha in 0..=255u8 {
            for color in [0u8, 1, 100, 254, 255] {
                let a = f64::from(alpha) / 255.0;
                let exact = f64::from(color) * a + 255.0 * (1.0 - a);
                assert!((f64::from(over(color, alpha, 255)) - exact).abs() <= 0.5 + 1e-9);
            }
        }
        assert_eq!((over(7, 255, 200), over(7, 0, 200)), (7, 200));
    }
}
