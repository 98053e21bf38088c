//! A checkpoint's preprocessing sizes, and the size a picture gets.

use serde_json::Value;

use crate::PictureError;

/// Largest ratio of a picture's sides.
pub const ASPECT_MAX: u32 = 200;
/// Largest side of a patch, most merged neighbours along an axis, most frames.
const SMALL_MAX: u64 = 64;
/// Most pixels of a prepared picture.
const AREA_MAX: u64 = 1 << 28;

/// What `preprocessor_config.json` says (`docs/model.md` section 1).
#[derive(Clone, Debug, PartialEq)]
pub struct Preprocessor {
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Patches merged to one row along each axis.
    pub merge: usize,
    /// Frames of a patch.
    pub frames: usize,
    /// Least pixels of a prepared picture.
    pub area_min: u64,
    /// Most pixels of a prepared picture.
    pub area_max: u64,
    /// Subtracted from each channel, of 1.
    pub mean: [f64; 3],
    /// Each channel is divided by it then.
    pub std: [f64; 3],
}

/// A value of `preprocessor_config.json` that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("preprocessor_config.json: {key} is {found}; {expected} is expected")]
pub struct PreprocessorError {
    /// The key.
    pub key: String,
    /// What is there.
    pub found: String,
    /// What is accepted.
    pub expected: String,
}

/// The size a picture gets, in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl Default for Preprocessor {
    /// The published values.
    fn default() -> Self {
        Self {
            patch: 16,
            merge: 2,
            frames: 2,
            area_min: 65_536,
            area_max: 16_777_216,
            mean: [0.5; 3],
            std: [0.5; 3],
        }
    }
}

impl Preprocessor {
    /// Reads `preprocessor_config.json`; what is absent has its published value.
    pub fn from_json(json: &Value) -> Result<Self, PreprocessorError> {
        let default = Self::default();
        let size = json.get("size").unwrap_or(&Value::Null);
        let area = |older: &str, newer: &str, default: u64| match (json.get(older), size.get(newer)) {
            (Some(value), None) => number(older, value, AREA_MAX),
            (_, Some(value)) => number(newer, value, AREA_MAX),
            (None, None) => Ok(default),
        };
        let small = |key: &str, default: usize| match json.get(key) {
            Some(value) => number(key, value, SMALL_MAX).map(|n| n as usize),
            None => Ok(default),
        };
        let made = Self {
            patch: small("patch_size", default.patch)?,
            merge: small("merge_size", default.merge)?,
            frames: small("temporal_patch_size", default.frames)?,
            area_min: area("min_pixels", "shortest_edge", default.area_min)?,
            area_max: area("max_pixels", "longest_edge", default.area_max)?,
            mean: channels(json, "image_mean", default.mean)?,
            std: channels(json, "image_std", default.std)?,
        };
        if let Some(zero) = made.std.iter().find(|std| **std == 0.0) {
            return Err(wrong("image_std", zero, "three numbers other than 0"));
        }
        let token = made.token_area();
        if made.area_min > made.area_max || made.area_max < token {
            let expected = format!("at least {token} and at least the lower bound");
            return Err(wrong("size", format!("{} to {}", made.area_min, made.area_max), expected));
        }
        Ok(made)
    }

    /// Pixels of one token.
    fn token_area(&self) -> u64 {
        let side = (self.patch * self.merge) as u64;
        side * side
    }

    /// Most tokens of a picture, long thin ones included.
    pub fn tokens_max(&self) -> usize {
        let of = |area: u64| area as f64 / self.token_area() as f64;
        // A side is never below one token, so a strip has up to `sqrt(ratio * area)`; sides of small
        // pictures are rounded up.
        let strip = |area: f64| (area.min(f64::from(ASPECT_MAX)) * f64::from(ASPECT_MAX)).sqrt() + 2.0;
        let enlarged = (of(self.area_min).sqrt() + 1.0).powi(2) + 2.0 * of(self.area_min).sqrt();
        of(self.area_max).max(strip(of(self.area_max))).max(enlarged) as usize
    }

    /// The same with at most about `tokens` tokens a picture.
    pub fn with_tokens(&self, tokens: usize) -> Self {
        let area = (tokens.max(1) as u64).saturating_mul(self.token_area()).min(self.area_max);
        Self { area_max: area, area_min: self.area_min.min(area), ..self.clone() }
    }

    /// The size a picture of `width` x `height` gets (`docs/model.md` section 10, step 2).
    pub fn target(&self, width: u32, height: u32) -> Result<Target, PictureError> {
        if width == 0
            || height == 0
            || width.max(height) / ASPECT_MAX > width.min(height)
            || u64::from(width.max(height)) > u64::from(width.min(height)) * u64::from(ASPECT_MAX)
        {
            return Err(PictureError::Aspect { width, height, max: ASPECT_MAX });
        }
        let step = (self.patch * self.merge) as f64;
        let (w, h) = (f64::from(width), f64::from(height));
        let nearest = |side: f64| (side / step).round_ties_even() * step;
        let area = nearest(w) * nearest(h);
        let (lo, hi) = (self.area_min as f64, self.area_max as f64);
        let (width, height) = if area > hi {
            let s = (h * w / hi).sqrt();
            let fit = |side: f64| ((side / s / step).floor() * step).max(step);
            (fit(w), fit(h))
        } else if area < lo {
            let s = (lo / (h * w)).sqrt();
            let fit = |side: f64| (side * s / step).ceil() * step;
            (fit(w), fit(h))
        } else {
            (nearest(w), nearest(h))
        };
        Ok(Target { width: width as u32, height: height as u32 })
    }

    /// The grid (frames, rows, columns) in patches of a picture of that size.
    pub fn grid(&self, target: Target) -> [usize; 3] {
        [1, target.height as usize / self.patch, target.width as usize / self.patch]
    }

    /// Tokens of a picture of `width` x `height`.
    pub fn tokens(&self, width: u32, height: u32) -> Result<usize, PictureError> {
        let [frames, rows, columns] = self.grid(self.target(width, height)?);
        Ok(frames * rows * columns / (self.merge * self.merge))
    }

    /// The normalized value of each 8-bit level, per channel: `(level / 255 - mean) / std`.
    pub fn levels(&self) -> [[f32; 256]; 3] {
        let value = |c: usize, level: usize| ((level as f64 / 255.0 - self.mean[c]) / self.std[c]) as f32;
        [0, 1, 2].map(|c| std::array::from_fn(|level| value(c, level)))
    }
}

fn wrong(key: &str, found: impl ToString, expected: impl ToString) -> PreprocessorError {
    PreprocessorError { key: key.into(), found: found.to_string(), expected: expected.to_string() }
}

fn number(key: &str, value: &Value, max: u64) -> Result<u64, PreprocessorError> {
    let number = value.as_u64().filter(|n| (1..=max).contains(n));
    number.ok_or_else(|| wrong(key, value, format!("a whole number from 1 to {max}")))
}

fn channels(json: &Value, key: &str, default: [f64; 3]) -> Result<[f64; 3], PreprocessorError> {
    let Some(value) = json.get(key) else { return Ok(default) };
    let finite = |value: &Value| value.as_f64().filter(|x| x.is_finite());
    let numbers: Option<Vec<f64>> = value.as_array().and_then(|list| list.iter().map(finite).collect());
    let three = numbers.and_then(|numbers| <[f64; 3]>::try_from(numbers).ok());
    three.ok_or_else(|| wrong(key, value, "three numbers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(made: &Preprocessor, (width, height): (u32, u32), expected: (u32, u32)) {
        let target = made.target(width, height).expect("a size that is taken");
        assert_eq!((target.width, target.height), expected, "{width} x {height}");
        assert!(made.tokens(width, height).expect("as above") <= made.tokens_max());
    }

    #[test]
    fn sides_are_rounded_and_areas_kept() {
        let made = Preprocessor::default();
        check(&made, (640, 480), (640, 480));
        check(&made, (1000, 1000), (992, 992)); // 31.25
        check(&made, (1008, 1040), (1024, 1024)); // halves go to the even multiple: 31.5, 32.5
        check(&made, (10, 10), (256, 256));
        check(&made, (16_000, 12_000), (4704, 3520));
        check(&made, (2, 400), (32, 3648));
        assert!(made.target(1, 201).is_err() && made.target(0, 5).is_err());
        assert!(made.target(2, 400).is_ok() && made.target(2, 401).is_err());
    }

    #[test]
    fn no_picture_has_more_tokens_than_planned() {
        for base in [
            Preprocessor::default(),
            Preprocessor { area_min: 4096, area_max: 16_384, ..Preprocessor::default() },
        ] {
            for made in [base.clone(), base.with_tokens(256), base.with_tokens(5), base.with_tokens(1)] {
                for long in (1..4000u32).step_by(37) {
                    for short in [long.div_ceil(200), long / 7 + 1, long] {
                        for (w, h) in [(long, short), (short, long)] {
                            assert!(
                                made.tokens(w, h).expect("in ratio") <= made.tokens_max(),
                                "{made:?} {w} x {h}"
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn files_of_both_spellings_are_read_and_nonsense_is_refused() {
        let read = |text: &str| Preprocessor::from_json(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(read("{}"), Ok(Preprocessor::default()));
        let older = read(r#"{"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14}"#).expect("valid");
        assert_eq!((older.area_min, older.area_max, older.patch), (3136, 12_845_056, 14));
        let newer = read(r#"{"size": {"shortest_edge": 512, "longest_edge": 4096}, "patch_size": 8}"#)
            .expect("valid");
        assert_eq!((newer.area_min, newer.area_max), (512, 4096));
        for (text, key) in [
            (r#"{"patch_size": 0}"#, "patch_size"),
            (r#"{"merge_size": -1}"#, "merge_size"),
            (r#"{"image_std": [1, 0, 1]}"#, "image_std"),
            (r#"{"image_mean": [1, 2]}"#, "image_mean"),
            (r#"{"size": {"longest_edge": 100}}"#, "size"),
            (r#"{"size": {"longest_edge": 1e30}}"#, "longest_edge"),
        ] {
            assert_eq!(read(text).expect_err(text).key, key);
        }
    }
}
