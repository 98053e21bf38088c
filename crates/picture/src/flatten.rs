//! Every colour type to opaque 8-bit RGB.

use image::ColorType;

/// 16 bits to 8, to the nearest.
fn narrow(value: u16) -> u8 {
    ((u32::from(value) + 128) / 257) as u8
}

/// `color` with `alpha` over `under`, to the nearest.
fn over(color: u8, alpha: u8, under: u8) -> u8 {
    let (color, alpha, under) = (u32::from(color), u32::from(alpha), u32::from(under));
    ((color * alpha + under * (255 - alpha) + 127) / 255) as u8
}

/// Both bytes of a level of 16 bits, in the machine's order, to 8 bits.
fn level([a, b]: [u8; 2]) -> u8 {
    narrow(u16::from_ne_bytes([a, b]))
}

/// `[height, width, 3]` bytes of a picture as its decoder gives it, over `background`. In place where a pixel
/// has three bytes or more. `None`: none of the four formats has such colours.
pub(crate) fn flatten(stored: Vec<u8>, color: ColorType, background: [u8; 3]) -> Option<Vec<u8>> {
    let blend = |rgb: [u8; 3], alpha: u8| [0, 1, 2].map(|c| over(rgb[c], alpha, background[c]));
    Some(match color {
        ColorType::Rgb8 => stored,
        ColorType::L8 => mapped(stored, |[l]| [l; 3]),
        ColorType::La8 => mapped(stored, |[l, a]| blend([l; 3], a)),
        ColorType::Rgba8 => mapped(stored, |[r, g, b, a]| blend([r, g, b], a)),
        ColorType::L16 => mapped(stored, |pair| [level(pair); 3]),
        ColorType::La16 => mapped(stored, |[l, m, a, b]| blend([level([l, m]); 3], level([a, b]))),
        ColorType::Rgb16 => mapped(stored, |[r, s, g, h, b, c]: [u8; 6]| [[r, s], [g, h], [b, c]].map(level)),
        ColorType::Rgba16 => mapped(stored, |[r, s, g, h, b, c, a, d]: [u8; 8]| {
            blend([[r, s], [g, h], [b, c]].map(level), level([a, d]))
        }),
        _ => return None,
    })
}

/// Each pixel of `N` bytes to one of three.
fn mapped<const N: usize>(mut stored: Vec<u8>, rgb: impl Fn([u8; N]) -> [u8; 3]) -> Vec<u8> {
    let count = stored.len() / N;
    if N < 3 {
        return stored.as_chunks::<N>().0.iter().flat_map(|&pixel| rgb(pixel)).collect();
    }
    for at in 0..count {
        let pixel: [u8; N] = *stored[at * N..].first_chunk().expect("inside by the count");
        stored[at * 3..][..3].copy_from_slice(&rgb(pixel));
    }
    stored.truncate(count * 3);
    stored.shrink_to_fit();
    stored
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
