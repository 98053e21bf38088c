//! What is asked: prompts short and long, with and without pictures, one turn or two, whole or streamed,
//! drawn from a seed.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use contracts::Random;
use picture::Rgb;
use serde_json::{Value, json};

/// Requests whose replies are computed alone before the load begins, the canary first.
pub(super) const KNOWN: usize = 9;
/// Most tokens of a reply.
const REPLY_MAX: usize = 64;
/// Words of a short prompt.
const SHORT: usize = 40;
/// Most words of a long prompt, where the context has room.
const LONG: usize = 1500;
/// Tokens of the context for each word of a long prompt: small vocabularies spell words out.
const TOKENS_A_WORD: usize = 8;
/// Most pictures of a prompt.
const PICTURES: usize = 3;
/// Sides of pictures, pixels.
const SIDES: std::ops::Range<usize> = 24..320;
/// Tokens of the context that pictures may need: a smaller one is asked without them.
const PICTURES_ROOM: usize = 512;
/// Pictures that are shown again and again, so that some are already known to the server.
const FAMILIAR: usize = 12;

const WORDS: [&str; 24] = [
    "river", "seven", "blue", "under", "glass", "and", "winter", "count", "paper", "the", "slow", "green",
    "name", "stone", "after", "small", "light", "open", "house", "word", "left", "is", "morning", "north",
];

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is read to its end.
    Whole,
    /// The connection is closed after this many milliseconds without an answer: in the queue or the prompt.
    LeaveEarly(u64),
    /// The stream is left after this many lines.
    LeaveAfter(usize),
    /// It is wrong, and must be refused with this code.
    Wrong(&'static str),
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// Its number among the known ones.
    pub(super) known: Option<usize>,
    /// The body of a chat completion.
    pub(super) body: Value,
    /// What becomes of it.
    pub(super) fate: Fate,
}

/// Draws requests.
#[derive(Clone, Debug)]
pub(super) struct Asks {
    random: Random,
    model: String,
    /// Words of the longest prompt.
    long: usize,
    /// Whether some prompts have pictures.
    pictures: bool,
}

impl Asks {
    /// Requests for a model whose context has so many tokens, and that sees pictures or does not.
    pub(super) fn new(seed: u64, model: &str, context: usize, sees: bool) -> Self {
        let pictures = sees && context >= 2 * PICTURES_ROOM;
        let room = if pictures { context - PICTURES_ROOM } else { context };
        let long = LONG.min(room / TOKENS_A_WORD).max(1);
        Self { random: Random(seed), model: model.to_owned(), long, pictures }
    }

    /// Whether some prompts have pictures.
    pub(super) fn has_pictures(&self) -> bool {
        self.pictures
    }

    /// The same with another seed.
    pub(super) fn reseeded(&self, seed: u64) -> Self {
        Self { random: Random(seed), ..self.clone() }
    }

    /// A known request: the same at every call with the same number and seed of the soak.
    pub(super) fn known(&self, number: usize, seed: u64) -> Ask {
        let mut asks = Self { random: Random(seed ^ ((number as u64 + 1) << 32)), ..self.clone() };
        let body = asks.body(number % 3 == 1);
        Ask { known: Some(number), body, fate: Fate::Whole }
    }

    /// The next request: every fourth is a known one, every sixth is left, some are wrong; every fourth of
    /// the others has pictures, and every third of the known ones.
    pub(super) fn next(&mut self, seed: u64) -> Ask {
        let mut ask = match self.random.below(4) {
            0 => self.known(self.random.clone().below(KNOWN), seed),
            _ => {
                let shows = self.random.below(4) == 0;
                Ask { known: None, body: self.body(shows), fate: Fate::Whole }
            }
        };
        let streams = self.random.below(2) == 0;
        ask.fate = match self.random.below(60) {
            0..5 => Fate::LeaveEarly(self.random.below(40) as u64 + 1),
            5..10 => Fate::LeaveAfter(self.random.below(40)),
            10 => Fate::Wrong("invalid_value"),
            11 if self.pictures => Fate::Wrong("invalid_image"),
            _ => Fate::Whole,
        };
        match ask.fate {
            Fate::LeaveAfter(_) => streamed(&mut ask.body),
            Fate::Wrong("invalid_image") => ask.body["messages"] = broken_picture(),
            Fate::Wrong(_) => ask.body["temperature"] = json!(-1),
            _ if streams => streamed(&mut ask.body),
            _ => {}
        }
        ask
    }

    /// What streams begin with, so that the shortest soak has a picture that is read to its end and a client
    /// that leaves: the first request of the first stream, and those after it and beside it.
    pub(super) fn opening(&mut self, place: u64) -> Option<Ask> {
        match place {
            0 => Some(Ask { known: None, body: self.body(true), fate: Fate::Whole }),
            1 => {
                // Any stream has more lines than one.
                let mut ask = Ask { known: None, body: self.body(false), fate: Fate::LeaveAfter(1) };
                streamed(&mut ask.body);
                Some(ask)
            }
            _ => None,
        }
    }

    fn words(&mut self, count: usize) -> String {
        let words: Vec<&str> = (0..count).map(|_| WORDS[self.random.below(WORDS.len())]).collect();
        words.join(" ")
    }

    fn question(&mut self) -> String {
        format!("What is {} + {}?", self.random.below(100), self.random.below(100))
    }

    /// A flat picture with a few boxes on it, as a part of a message.
    fn picture(&mut self) -> Value {
        let mut draw = match self.random.below(2) {
            0 => Random(self.random.below(FAMILIAR) as u64),
            _ => Random(self.random.below(1 << 30) as u64),
        };
        let mut side = || SIDES.start + draw.below(SIDES.len());
        let (width, height) = (side(), side());
        let mut color = || [0; 3].map(|_| draw.below(256) as u8);
        let mut pixels = color().repeat(width * height);
        for _ in 0..=draw.below(4) {
            let color = [0; 3].map(|_| draw.below(256) as u8);
            let (left, top) = (draw.below(width), draw.below(height));
            let (right, bottom) = (left + draw.below(width - left), top + draw.below(height - top));
            for row in top..=bottom {
                let line = &mut pixels[3 * (row * width + left)..=3 * (row * width + right) + 2];
                line.chunks_exact_mut(3).for_each(|pixel| pixel.copy_from_slice(&color));
            }
        }
        let drawn = Rgb { width: width as u32, height: height as u32, pixels };
        let png = drawn.to_png().expect("three bytes for each pixel");
        json!({"type": "image_url", "image_url": {
            "url": format!("data:image/png;base64,{}", STANDARD.encode(png)),
        }})
    }

    fn body(&mut self, shows: bool) -> Value {
        let mut messages = Vec::new();
        if self.random.below(3) == 0 {
            messages.push(json!({"role": "system", "content": "Answer in a few words."}));
        }
        let count = match self.random.below(10) {
            0 => self.random.below(self.long) + 1,
            1..4 => self.random.below(SHORT.min(self.long)) + 1,
            _ => 0,
        };
        let opening = if count > 0 { self.words(count) } else { self.question() };
        let content = match shows && self.pictures {
            true => {
                let mut parts: Vec<Value> =
                    (0..=self.random.below(PICTURES)).map(|_| self.picture()).collect();
                let place = self.random.below(parts.len() + 1);
                parts.insert(place, json!({"type": "text", "text": opening}));
                json!(parts)
            }
            false => json!(opening),
        };
        messages.push(json!({"role": "user", "content": content}));
        if self.random.below(3) == 0 {
            messages.push(json!({"role": "assistant", "content": "95"}));
            let question = self.question();
            messages.push(json!({"role": "user", "content": question}));
        }
        let temperature = if self.random.below(2) == 0 { 0.0 } else { 0.8 };
        let effort = if self.random.below(2) == 0 { "none" } else { "high" };
        json!({
            "model": self.model,
            "messages": messages,
            "temperature": temperature,
            "seed": self.random.below(1 << 30),
            "reasoning_effort": effort,
            "max_tokens": self.random.below(REPLY_MAX) + 1,
        })
    }
}

/// The same request as a stream with its usage.
fn streamed(body: &mut Value) {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
}

/// A conversation whose picture is none.
fn broken_picture() -> Value {
    let url = format!("data:image/png;base64,{}", STANDARD.encode(b"\x89PNG\r\n\x1a\nand no more"));
    json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
}

/// Pictures of a request.
pub(super) fn pictures(body: &Value) -> usize {
    let messages = body["messages"].as_array().into_iter().flatten();
    let parts = messages.filter_map(|message| message["content"].as_array()).flatten();
    parts.filter(|part| part["type"] == "image_url").count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_says_all() {
        let make = |seed| Asks::new(seed, "m", 4096, true);
        let (mut one, mut other) = (make(5), make(5));
        let mut fates = [0; 4];
        for _ in 0..600 {
            let (one, other) = (one.next(5), other.next(5));
            assert_eq!((&one.body, one.fate, one.known), (&other.body, other.fate, other.known));
            fates[match one.fate {
                Fate::Whole => 0,
                Fate::LeaveEarly(_) => 1,
                Fate::LeaveAfter(_) => 2,
                Fate::Wrong(_) => 3,
            }] += 1;
        }
        assert!(fates.iter().all(|count| *count > 0), "{fates:?}");
        assert_eq!(make(1).known(3, 9).body, make(2).known(3, 9).body);
        assert_ne!(make(1).known(3, 9).body, make(1).known(4, 9).body);
    }

    #[test]
    fn the_shortest_soak_has_a_picture_and_a_client_that_leaves() {
        for seed in 0..50 {
            let mut asks = Asks::new(seed, "m", 4096, true);
            let (first, second) = (asks.opening(0).unwrap(), asks.opening(1).unwrap());
            assert!(first.fate == Fate::Whole && pictures(&first.body) > 0, "{first:?}");
            assert!(second.fate == Fate::LeaveAfter(1) && second.body["stream"] == true, "{second:?}");
            assert!(asks.opening(2).is_none());
        }
    }

    #[test]
    fn pictures_are_whole_and_only_for_those_who_see() {
        let shown = |context, sees| {
            let mut asks = Asks::new(3, "m", context, sees);
            let bodies: Vec<Value> = (0..KNOWN).map(|number| asks.known(number, 3).body).collect();
            let next: Vec<Value> = (0..100).map(|_| asks.next(3).body).collect();
            (bodies.iter().map(pictures).sum::<usize>(), next.iter().map(pictures).sum::<usize>())
        };
        let (known, next) = shown(4096, true);
        assert!(known >= KNOWN / 3 && next > 20, "{known} {next}");
        assert_eq!((shown(4096, false), shown(512, true)), ((0, 0), (0, 0)));
        let mut asks = Asks::new(3, "m", 4096, true);
        for _ in 0..50 {
            let part = asks.picture();
            let url = part["image_url"]["url"].as_str().unwrap();
            let bytes = STANDARD.decode(url.strip_prefix("data:image/png;base64,").unwrap()).unwrap();
            let (width, height) = picture::size(&bytes, &picture::Limits::default()).unwrap();
            assert!([width, height].iter().all(|side| SIDES.contains(&(*side as usize))));
        }
    }
}
