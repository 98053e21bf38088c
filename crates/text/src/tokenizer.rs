//! The tokenizer of a model folder: strings to token ids and back.
//!
//! One type of ours around the byte-level BPE of the `tokenizers` crate. The added (control) tokens are
//! matched here and not by that crate, so that a caller chooses for each text whether a control spelling
//! means the token ([`Tokenizer::encode_raw`]) or only itself ([`Tokenizer::encode_text`]).

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use crate::control::{ControlToken, ControlTokens, Stretch};
use crate::error::TextError;
use crate::files;

/// Largest `tokenizer.json` read, bytes.
pub const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Ids must lie below this.
pub const TOKEN_IDS_MAX: u32 = 1 << 22;
/// Bytes of text for each token that is allowed, up to which a prompt may fit and is encoded at once.
const BYTES_A_TOKEN: usize = 8;
/// Bytes of a longer one that are counted at a time.
const MEASURED_BYTES: usize = 64 << 10;

/// How long a prompt may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptMax {
    /// Tokens.
    pub tokens: usize,
    /// Text up to here is encoded however many tokens it has: its number is wanted.
    pub counted_bytes: usize,
}

/// Whether special tokens (those the tokenizer file marks so) are part of decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Left out: the form of replies.
    Skip,
    /// Spelled out: the form of `/detokenize`.
    Keep,
}

/// A byte-level BPE tokenizer. Cheap to clone; safe to share between threads.
#[derive(Clone)]
pub struct Tokenizer {
    parts: Arc<Parts>,
}

struct Parts {
    bpe: tokenizers::Tokenizer,
    controls: ControlTokens,
    vocabulary: Vocabulary,
    digest: String,
}

/// Bytes of every id, in one block.
struct Vocabulary {
    bytes: Vec<u8>,
    /// Start and end in `bytes`; `None` for ids that no token has.
    spans: Vec<Option<(u32, u32)>>,
    kinds: Vec<Kind>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ordinary,
    Control,
    Special,
}

#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    pre_tokenizer: Value,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder.
    pub fn open(dir: &Path) -> Result<Self, TextError> {
        Self::from_json(&files::read(&dir.join("tokenizer.json"), TOKENIZER_BYTES_MAX)?)
    }

    /// Reads the content of a `tokenizer.json`.
    pub fn from_json(data: &[u8]) -> Result<Self, TextError> {
        let header: Header = files::json("tokenizer.json", data)?;
        check_byte_level("decoder", &header.decoder)?;
        check_byte_level("pre_tokenizer", &header.pre_tokenizer)?;
        let controls = ControlTokens::new(checked_controls(header.added_tokens)?);
        let bpe = tokenizers::Tokenizer::from_bytes(data)
            .map_err(|error| TextError::Json { file: "tokenizer.json", detail: error.to_string() })?;
        let vocabulary = Vocabulary::new(&bpe, &controls)?;
        let digest = files::sha256_hex(data);
        Ok(Self { parts: Arc::new(Parts { bpe, controls, vocabulary, digest }) })
    }

    /// Highest id plus one. The model's own vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.parts.vocabulary.spans.len()
    }

    /// SHA-256 of the tokenizer file, lower-case hexadecimal.
    pub fn digest(&self) -> &str {
        &self.parts.digest
    }

    /// Ids of a text from outside: the spelling of a control token never becomes a control token.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_plain(text, &mut ids)?;
        Ok(ids)
    }

    /// Ids of trusted or raw text: control spellings become control tokens.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        for stretch in self.parts.controls.split(text) {
            match stretch {
                Stretch::Plain(text) => self.encode_plain(text, &mut ids)?,
                Stretch::Control(id, _) => ids.push(id),
            }
        }
        Ok(ids)
    }

    /// About how many tokens some texts have together, if these are far more than `most`; `None` where they
    /// may fit. Encoding takes time and many times the memory of a text, so only as much of them is encoded
    /// as tells; the number is that of the beginning, scaled.
    pub fn excess(&self, texts: &[&str], most: PromptMax) -> Result<Option<usize>, TextError> {
        let bytes: usize = texts.iter().map(|text| text.len()).sum();
        if bytes <= most.tokens.saturating_mul(BYTES_A_TOKEN).max(most.counted_bytes) {
            return Ok(None);
        }
        // Cuts make a few tokens more.
        let enough = most.tokens.saturating_add(most.tokens / 8);
        let (mut tokens, mut measured) = (0, 0);
        for text in texts {
            let mut rest = *text;
            while !rest.is_empty() {
                let end = (0..=rest.len().min(MEASURED_BYTES)).rev().find(|&end| rest.is_char_boundary(end));
                let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
                tokens += self.encode_text(part)?.len();
                measured += part.len();
                rest = after;
                if tokens > enough {
                    return Ok(Some((tokens as f64 / measured as f64 * bytes as f64) as usize));
                }
            }
        }
        Ok(None)
    }

    /// Appends the ids of `text`, by the tokenizer's normalizer, pre-tokenizer and merges alone: this path
    /// has no knowledge of added tokens.
    pub(crate) fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if text.is_empty() {
            return Ok(());
        }
        let bpe = &self.parts.bpe;
        let run = || -> tokenizers::Result<PreTokenizedString> {
            let mut normalized = NormalizedString::from(text);
            if let Some(normalizer) = bpe.get_normalizer() {
                normalizer.normalize(&mut normalized)?;
            }
            let mut words = PreTokenizedString::from(normalized);
            if let Some(pre_tokenizer) = bpe.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut words)?;
            }
            words.tokenize(|word| bpe.get_model().tokenize(word.get()))?;
            Ok(words)
        };
        let words =
            run().map_err(|error| TextError::Encode { bytes: text.len(), detail: error.to_string() })?;
        for (_, _, tokens) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            ids.extend(tokens.iter().flatten().map(|token| token.id));
        }
        Ok(())
    }

    /// The text of some ids; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.
    pub fn decode(&self, ids: &[u32], specials: Specials) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if specials == Specials::Keep || !self.is_special(id) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        match String::from_utf8_lossy(&bytes) {
            std::borrow::Cow::Owned(text) => text,
            std::borrow::Cow::Borrowed(_) => String::from_utf8(bytes).expect("just found to be UTF-8"),
        }
    }

    /// The bytes one id stands for (a control token's are its spelling); `None` if no token has the id.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        let vocabulary = &self.parts.vocabulary;
        let (start, end) = (*vocabulary.spans.get(id as usize)?)?;
        Some(&vocabulary.bytes[start as usize..end as usize])
    }

    /// Id of the control token with this spelling.
    pub fn control_id(&self, content: &str) -> Option<u32> {
        self.parts.controls.by_content(content).map(|token| token.id)
    }

    /// Spelling of a control token; `None` for an ordinary id.
    pub fn control_content(&self, id: u32) -> Option<&str> {
        let kind = *self.parts.vocabulary.kinds.get(id as usize)?;
        if kind == Kind::Ordinary {
            return None;
        }
        std::str::from_utf8(self.token_bytes(id)?).ok()
    }

    /// Whether the id is a token that the file marks special; such never show in a reply.
    pub fn is_special(&self, id: u32) -> bool {
        self.parts.vocabulary.kinds.get(id as usize) == Some(&Kind::Special)
    }

    /// Every control token, longest spelling first.
    pub fn control_tokens(&self) -> &[ControlToken] {
        self.parts.controls.all()
    }

    pub(crate) fn controls(&self) -> &ControlTokens {
        &self.parts.controls
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} ids, sha256:{})", self.vocab_size(), self.digest())
    }
}

/// A byte-level part, alone or in a sequence: token bytes are read off by that alphabet.
fn check_byte_level(what: &str, part: &Value) -> Result<(), TextError> {
    let is_byte_level = |part: &Value| part["type"] == "ByteLevel";
    let in_sequence = |key: &str| part[key].as_array().is_some_and(|parts| parts.iter().any(is_byte_level));
    if is_byte_level(part) || in_sequence("pretokenizers") || in_sequence("decoders") {
        return Ok(());
    }
    Err(TextError::UnsupportedTokenizer {
        what: what.to_owned(),
        found: part["type"].as_str().unwrap_or("absent").to_owned(),
        supported: "ByteLevel, alone or in a sequence",
    })
}

fn checked_controls(added: Vec<AddedToken>) -> Result<Vec<ControlToken>, TextError> {
    let mut controls = Vec::with_capacity(added.len());
    for token in added {
        // Matching here is exact; these flags would let a token reach over its neighbours.
        let flags = [
            ("lstrip", token.lstrip),
            ("rstrip", token.rstrip),
            ("single_word", token.single_word),
            ("normalized, with letters outside ASCII", token.normalized && !token.content.is_ascii()),
        ];
        if let Some((flag, _)) = flags.iter().find(|(_, set)| *set) {
            return Err(TextError::UnsupportedTokenizer {
                what: format!("added token {} ({:?})", token.id, token.content),
                found: (*flag).to_owned(),
                supported: "added tokens matched exactly",
            });
        }
        controls.push(ControlToken { id: token.id, content: token.content, special: token.special });
    }
    Ok(controls)
}

impl Vocabulary {
    fn new(bpe: &tokenizers::Tokenizer, controls: &ControlTokens) -> Result<Self, TextError> {
        let ordinary = bpe.get_vocab(false);
        let highest = ordinary.values().copied().chain(controls.all().iter().map(|token| token.id)).max();
        let highest = highest.unwrap_or(0);
        if highest >= TOKEN_IDS_MAX {
            return Err(TextError::UnsupportedTokenizer {
                what: "the highest id".to_owned(),
                found: highest.to_string(),
                supported: "ids below 4194304",
            });
        }
        let ids = highest as usize + 1;
        let mut vocabulary =
            Self { bytes: Vec::new(), spans: vec![None; ids], kinds: vec![Kind::Ordinary; ids] };
        let alphabet = byte_alphabet();
        for (token, id) in &ordinary {
            let bytes: Option<Vec<u8>> = token.chars().map(|c| byte_of(&alphabet, c)).collect();
            // A token outside the alphabet cannot come from text; it decodes to its own spelling.
            vocabulary.place(*id, &bytes.unwrap_or_else(|| token.as_bytes().to_vec()), Kind::Ordinary);
        }
        for token in controls.all() {
            let kind = if token.special { Kind::Special } else { Kind::Control };
            vocabulary.place(token.id, token.content.as_bytes(), kind);
        }
        Ok(vocabulary)
    }

    fn place(&mut self, id: u32, bytes: &[u8], kind: Kind) {
        let start = self.bytes.len() as u32;
        self.bytes.extend_from_slice(bytes);
        self.spans[id as usize] = Some((start, self.bytes.len() as u32));
        self.kinds[id as usize] = kind;
    }
}

/// The GPT-2 byte alphabet, which byte-level tokenizers spell their tokens in: printable Latin-1 bytes
/// stand for themselves, the other 68 for U+0100 onwards in byte order.
fn byte_alphabet() -> [char; 256] {
    let mut alphabet = ['\0'; 256];
    let mut next = 0x100;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        alphabet[usize::from(byte)] = if printable {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).expect("U+0100 to U+0143 are characters")
        };
    }
    alphabet
}

fn byte_of(alphabet: &[char; 256], c: char) -> Option<u8> {
    // Printable Latin-1 maps to itself; the rest is a short search.
    if (c as u32) < 256 && alphabet[c as usize] == c {
        return Some(c as u8);
    }
    if (c as u32) < 0x100 || (c as u32) > 0x143 {
        return None;
    }
    alphabet.iter().position(|&letter| letter == c).map(|byte| byte as u8)
}
