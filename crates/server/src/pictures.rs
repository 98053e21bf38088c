//! Pictures of a chat: from `data:` URLs to what the engine takes (`docs/api.md` 3.3).
//!
//! [`Vision::measure`] looks at headers only: it gives the tokens of each picture, which is a function of
//! its size, and refuses what is too large before memory is taken. [`Vision::prepare`] decodes, on a few
//! threads of its own.

use std::sync::Arc;
use std::time::Instant;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use picture::{
    Busy, Limits, PictureError, Prepared, Preprocessor, PreprocessorError, Workers, prepare, size,
};
use text::{HistoryImage, Rendered};

use crate::links::{FETCH_TIME, LinkError, Links};

/// Tokens of a picture whose `detail` is `low`, at most.
pub const LOW_DETAIL_TOKENS: usize = 256;
/// Most pictures of a request.
pub const PICTURES_MAX: usize = 32;
/// Most pixels of all pictures of a request, as their headers say.
pub const PIXELS_MAX: u64 = 200_000_000;
/// Most bytes that the links of a request may bring: as many as a request's body.
const LINK_BYTES_MAX: usize = 64 << 20;
/// Threads that decode. Each may hold a picture of the largest size.
const THREADS: usize = 2;
/// Pictures that may wait for a thread: those of a few requests.
const WAITING_MAX: usize = 4 * PICTURES_MAX;

/// Base64 of the standard alphabet, padding optional.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// How pictures are read.
#[derive(Clone, Debug)]
pub struct VisionSettings {
    /// The checkpoint's preprocessing.
    pub preprocessor: Preprocessor,
    /// Most tokens of a picture.
    pub tokens_max: usize,
    /// What shows through transparent places.
    pub background: [u8; 3],
    /// Hosts whose pictures are fetched; none: no link is.
    pub link_hosts: Vec<String>,
}

impl VisionSettings {
    /// The checkpoint's own: `preprocessor_config.json` as JSON, white behind transparency, at most
    /// `tokens` a picture.
    pub fn new(json: &serde_json::Value, tokens: Option<usize>) -> Result<Self, PreprocessorError> {
        let preprocessor = Preprocessor::from_json(json)?;
        let preprocessor = tokens.map_or(preprocessor.clone(), |tokens| preprocessor.with_tokens(tokens));
        Ok(Self {
            tokens_max: preprocessor.tokens_max(),
            preprocessor,
            background: [255; 3],
            link_hosts: Vec::new(),
        })
    }
}

/// What makes pictures ready for the model.
pub struct Vision {
    settings: VisionSettings,
    limits: Limits,
    workers: Workers,
    links: Option<Links>,
}

/// Why a picture is refused, and where it stands in the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct PictureFault {
    /// Path of its part in the request.
    pub path: String,
    /// What is wrong.
    pub problem: PictureProblem,
}

/// What is wrong with a picture.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PictureProblem {
    /// The model runs without its vision tower, or has none.
    #[error("pictures are not supported by this model as it is loaded; send text only")]
    NoVision,
    /// More than one request may have.
    #[error("{found} pictures; a request may have {PICTURES_MAX}")]
    TooMany {
        /// Pictures of the request.
        found: usize,
    },
    /// More pixels than one request may have.
    #[error(
        "{found} pixels up to this picture; the pictures of a request may have {PIXELS_MAX}: scale them down"
    )]
    TooManyPixels {
        /// Pixels of the pictures up to this one.
        found: u64,
    },
    /// A link that gave no picture.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Neither a link nor a data URL.
    #[error("a data:image/TYPE;base64,... URL is expected, not {found}")]
    Url {
        /// What was given, in words.
        found: String,
    },
    /// Characters that are not base64.
    #[error("the picture is not base64 of the standard alphabet, without white space: {reason}")]
    Base64 {
        /// What and where.
        reason: String,
    },
    /// An unknown `detail`.
    #[error("detail is {found:?}; low, high or auto is expected")]
    Detail {
        /// What was given.
        found: String,
    },
    /// The picture itself.
    #[error(transparent)]
    Picture(#[from] PictureError),
    /// Too many pictures are being decoded.
    #[error(transparent)]
    Busy(#[from] Busy),
    /// A fault of this program.
    #[error("a fault while the picture was decoded")]
    Fault,
}

/// What the pictures of one request may still take.
struct Room {
    /// Pixels of those that were looked at.
    pixels: u64,
    /// Bytes that links may bring.
    link_bytes: usize,
    /// When all links must be read.
    end: Instant,
}

/// A picture whose header was read.
pub struct Measured {
    path: String,
    bytes: Vec<u8>,
    preprocessor: Preprocessor,
    /// Tokens in the prompt.
    pub tokens: usize,
}

impl Vision {
    /// Starts the threads.
    pub fn new(settings: VisionSettings) -> std::io::Result<Self> {
        let links = (!settings.link_hosts.is_empty()).then(|| Links::new(&settings.link_hosts));
        let workers = Workers::new(THREADS, WAITING_MAX)?;
        Ok(Self { settings, limits: Limits::default(), workers, links })
    }

    /// How pictures are read.
    pub fn settings(&self) -> &VisionSettings {
        &self.settings
    }

    /// Reads the header of every picture; those behind links are fetched whole.
    pub fn measure(&self, images: &[HistoryImage]) -> Result<Vec<Measured>, PictureFault> {
        if let Some(extra) = images.get(PICTURES_MAX) {
            let problem = PictureProblem::TooMany { found: images.len() };
            return Err(PictureFault { path: extra.path.clone(), problem });
        }
        let mut room = Room { pixels: 0, link_bytes: LINK_BYTES_MAX, end: Instant::now() + FETCH_TIME };
        let one = |image: &HistoryImage| {
            let measured = self.measured(image, &mut room);
            measured.map_err(|problem| PictureFault { path: image.path.clone(), problem })
        };
        images.iter().map(one).collect()
    }

    fn measured(&self, image: &HistoryImage, room: &mut Room) -> Result<Measured, PictureProblem> {
        let preprocessor = match image.image.detail.as_deref() {
            None | Some("auto" | "high") => self.settings.preprocessor.clone(),
            Some("low") => self.settings.preprocessor.with_tokens(LOW_DETAIL_TOKENS),
            Some(other) => {
                let found = other.chars().take(40).collect();
                return Err(PictureProblem::Detail { found });
            }
        };
        let bytes = self.bytes(&image.image.url, room)?;
        let (width, height) = size(&bytes, &self.limits)?;
        room.pixels += u64::from(width) * u64::from(height);
        if room.pixels > PIXELS_MAX {
            return Err(PictureProblem::TooManyPixels { found: room.pixels });
        }
        let tokens = preprocessor.tokens(width, height)?;
        Ok(Measured { path: image.path.clone(), bytes, preprocessor, tokens })
    }

    /// Bytes of a data URL, or behind a link.
    fn bytes(&self, url: &str, room: &mut Room) -> Result<Vec<u8>, PictureProblem> {
        let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
        if ["http", "https"].iter().any(|link| scheme.eq_ignore_ascii_case(link)) {
            let links = self.links.as_ref().ok_or(LinkError::Off)?;
            let bytes = links.read(url, self.limits.bytes_max.min(room.link_bytes), room.end)?;
            room.link_bytes -= bytes.len();
            return Ok(bytes);
        }
        let data = data_of(url).ok_or_else(|| PictureProblem::Url { found: described(url) })?;
        // Four characters are three bytes: refused before they are decoded.
        let most = data.len() / 4 * 3;
        if most > self.limits.bytes_max + 3 {
            return Err(PictureError::Bytes { found: most, max: self.limits.bytes_max }.into());
        }
        BASE64.decode(data).map_err(|error| PictureProblem::Base64 { reason: reason(data, &error) })
    }

    /// Decodes, resizes and cuts the pictures, in order. Waits for the threads.
    pub fn prepare(&self, pictures: Vec<Measured>) -> Result<Vec<Arc<engine::Picture>>, PictureFault> {
        let background = self.settings.background;
        let limits = self.limits;
        let queued = pictures.into_iter().map(|Measured { path, bytes, preprocessor, .. }| {
            let ticket = self.workers.run(move || prepare(&bytes, &limits, background, &preprocessor));
            (path, ticket)
        });
        // All are queued before the first is waited for.
        let queued: Vec<_> = queued.collect();
        let done = queued.into_iter().map(|(path, ticket)| {
            let prepared = ticket.map_err(PictureProblem::from).and_then(|ticket| {
                let prepared = ticket.wait().ok_or(PictureProblem::Fault)?;
                Ok(prepared?)
            });
            prepared
                .map(|prepared| Arc::new(shown(prepared)))
                .map_err(|problem| PictureFault { path, problem })
        });
        done.collect()
    }
}

/// What stands behind `data:image/TYPE;base64,`, whose letters may be of either case.
fn data_of(url: &str) -> Option<&str> {
    let (head, data) = url.split_once(',')?;
    let head = head.to_ascii_lowercase();
    let kind = head.strip_prefix("data:image/")?.strip_suffix(";base64")?;
    (!kind.is_empty()).then_some(data)
}

/// What was given in place of a picture's URL.
fn described(url: &str) -> String {
    let scheme = url.split_once(':').map(|(scheme, _)| scheme);
    let scheme =
        scheme.filter(|it| (1..=10).contains(&it.len()) && it.bytes().all(|b| b.is_ascii_alphanumeric()));
    let Some(scheme) = scheme else { return format!("a text of {} bytes without a scheme", url.len()) };
    if !scheme.eq_ignore_ascii_case("data") {
        return format!("a URL that begins with {:?}", format!("{scheme}:"));
    }
    match url.split_once(',') {
        Some((head, _)) => format!("{:?}", head.chars().take(40).collect::<String>()),
        None => "a data: URL without a comma".to_owned(),
    }
}

/// Why a text is not base64.
fn reason(data: &str, error: &base64::DecodeError) -> String {
    match *error {
        base64::DecodeError::InvalidByte(at, _) | base64::DecodeError::InvalidLastSymbol(at, _) => {
            let found = data.get(at..).and_then(|rest| rest.chars().next());
            found.map_or_else(|| format!("at {at}"), |found| format!("{found:?} at {at}"))
        }
        _ => format!("{} characters are no whole number of bytes", data.len()),
    }
}

/// The engine's form of a prepared picture.
fn shown(prepared: Prepared) -> engine::Picture {
    let Prepared { grid, patches, levels, digest, .. } = prepared;
    engine::Picture { grid, patches, levels: Box::new(levels), digest }
}

/// Makes room in a rendered prompt for its pictures. Gives where each begins.
pub(crate) fn expand(rendered: &mut Rendered, pictures: &[Measured]) -> Vec<usize> {
    let tokens: Vec<usize> = pictures.iter().map(|picture| picture.tokens).collect();
    rendered.expand_images(&tokens);
    rendered.image_positions.clone()
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::STANDARD as STANDARD_PADDED;
    use text::Image;

    use super::*;

    /// A white pixel.
    const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEA\
                       sTj2FAAAAABJRU5ErkJggg==";

    fn vision() -> Vision {
        Vision::new(VisionSettings::new(&serde_json::json!({}), None).unwrap()).unwrap()
    }

    fn measure(url: &str, detail: Option<&str>) -> Result<Vec<Measured>, PictureFault> {
        let image = Image { url: url.into(), detail: detail.map(str::to_owned) };
        vision().measure(&[HistoryImage { path: "messages[0].content[1]".into(), image }])
    }

    #[test]
    fn each_fault_has_its_words() {
        for (url, detail, words) in [
            ("https://example.com/a.png", None, "not fetched by this server"),
            ("http://127.0.0.1/a.png", None, "not fetched by this server"),
            ("HTTPS://example.com/a.png", None, "not fetched by this server"),
            (
                "file:///etc/passwd",
                None,
                "TYPE;base64,... URL is expected, not a URL that begins with \"file:\"",
            ),
            ("data:text/plain;base64,AAAA", None, "is expected, not \"data:text/plain;base64\""),
            ("data:image/png,abc", None, "is expected, not \"data:image/png\""),
            ("data:image/;base64,AAAA", None, "is expected, not \"data:image/;base64\""),
            ("data:image/png;base64", None, "not a data: URL without a comma"),
            ("iVBORw0KGgo", None, "not a text of 11 bytes without a scheme"),
            (
                "data:image/png;base64,AA AA",
                None,
                "not base64 of the standard alphabet, without white space: ' ' at 2",
            ),
            ("data:image/png;base64,AAé", None, "'é' at 2"),
            ("data:image/png;base64,AAAAA", None, "5 characters"),
            ("data:image/png;base64,AAAA", None, "not a picture"),
            ("data:image/png;base64,", None, "there are no bytes"),
            ("data:image/png;base64,_-__", None, "'_' at 0"),
            (&format!("data:image/png;base64,{PNG}"), Some("huge"), "low, high or auto"),
        ] {
            let fault = measure(url, detail).err().expect(url);
            assert!(fault.to_string().starts_with("messages[0].content[1]: "), "{fault}");
            assert!(fault.to_string().contains(words), "{fault}");
        }
        let long = format!("data:image/png;base64,{}", "A".repeat(28 << 20));
        let fault = measure(&long, None).err().expect("too long");
        assert!(matches!(fault.problem, PictureProblem::Picture(PictureError::Bytes { .. })), "{fault}");
    }

    #[test]
    fn pictures_are_measured_and_prepared() {
        for url in [
            format!("data:image/png;base64,{PNG}"),
            format!("data:image/gif;base64,{}", PNG.trim_end_matches('=')),
            format!("DATA:Image/PNG;Base64,{PNG}"),
        ] {
            let measured = measure(&url, Some("high")).unwrap();
            assert_eq!(measured[0].tokens, 64);
            let pictures = vision().prepare(measured).unwrap();
            assert_eq!((pictures[0].grid, pictures[0].count()), ([1, 16, 16], 256));
            assert!(pictures[0].patches.iter().all(|level| *level == 255));
        }
    }

    #[test]
    fn a_request_has_so_many_pixels() {
        // A GIF says its size in its first bytes; so many bytes could hold 49 million pixels.
        let side = 7000u16.to_le_bytes();
        let screen = [&b"GIF89a"[..], &side, &side, &[0; 3]].concat();
        let gif = [&screen[..], b",\0\0\0\0", &side, &side, &[0, 2], &[0; 12_000], b";"].concat();
        let url = format!("data:image/gif;base64,{}", STANDARD_PADDED.encode(gif));
        let image = Image { url, detail: None };
        let image = |at: usize| HistoryImage { path: format!("{at}"), image: image.clone() };
        let images: Vec<HistoryImage> = (0..5).map(image).collect();
        assert_eq!(vision().measure(&images[1..]).unwrap().len(), 4);
        let fault = vision().measure(&images).err().unwrap();
        let found = 5 * 49_000_000;
        assert_eq!((fault.path.as_str(), fault.problem), ("4", PictureProblem::TooManyPixels { found }));
    }

    #[test]
    fn links_are_read_only_from_named_hosts() {
        let mut settings = VisionSettings::new(&serde_json::json!({}), None).unwrap();
        settings.link_hosts = vec!["localhost".into()];
        let vision = Vision::new(settings).unwrap();
        for (url, words) in [
            ("https://example.com/a.png", "fetches no pictures from \"example.com\""),
            ("http://localhost/a.png", "must be https://HOST/"),
            ("https://localhost/a.png", "an address that is not public"),
        ] {
            let image = Image { url: url.into(), detail: None };
            let fault = vision.measure(&[HistoryImage { path: "p".into(), image }]).err().unwrap();
            assert!(fault.to_string().contains(words), "{fault}");
        }
    }

    #[test]
    fn a_request_has_so_many_pictures() {
        let image = Image { url: format!("data:image/png;base64,{PNG}"), detail: None };
        let image = |at: usize| HistoryImage { path: format!("{at}"), image: image.clone() };
        let images: Vec<HistoryImage> = (0..PICTURES_MAX + 1).map(image).collect();
        assert_eq!(vision().measure(&images[1..]).unwrap().len(), PICTURES_MAX);
        let fault = vision().measure(&images).err().unwrap();
        assert_eq!((fault.path.as_str(), fault.problem), ("32", PictureProblem::TooMany { found: 33 }));
    }
}
