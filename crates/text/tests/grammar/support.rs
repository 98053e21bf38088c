//! Tokenizers, and replies drawn at random from what a grammar allows.

use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Value, json};
use text::{Answer, Grammar, GrammarCompiler, GrammarError, Matcher, Specials, Tokenizer};

/// The demo model's tokenizer and end ids.
pub(crate) fn demo() -> &'static (Tokenizer, GrammarCompiler, Vec<u32>) {
    static DEMO: OnceLock<(Tokenizer, GrammarCompiler, Vec<u32>)> = OnceLock::new();
    DEMO.get_or_init(|| {
        let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
        let tokenizer = Tokenizer::open(dir).unwrap();
        let ends =
            vec![tokenizer.control_id("<|im_end|>").unwrap(), tokenizer.control_id("<|endoftext|>").unwrap()];
        let compiler = GrammarCompiler::new(&tokenizer, &ends).unwrap();
        (tokenizer, compiler, ends)
    })
}

/// Every byte, some longer tokens, one control token: few enough to try each.
pub(crate) fn tiny() -> (Tokenizer, GrammarCompiler, u32) {
    let mut letters: Vec<String> = Vec::new();
    let mut next = 0x100;
    for byte in 0..=255_u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let letter = if printable { char::from(byte) } else { char::from_u32(next).unwrap() };
        next += u32::from(!printable);
        letters.push(letter.to_string());
    }
    let merges = ["{ \"", "\" :", "\" ,", "t r", "tr u", "tru e", "1 2", "Ã ©", "} }", "< /", "Ċ Ċ"];
    let mut vocabulary: serde_json::Map<String, Value> =
        letters.into_iter().enumerate().map(|(id, letter)| (letter, json!(id))).collect();
    for merge in merges {
        let id = vocabulary.len();
        vocabulary.insert(merge.replace(' ', ""), json!(id));
    }
    let end = vocabulary.len() as u32;
    let file = json!({
        "added_tokens": [{"id": end, "content": "<|end|>", "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    });
    let tokenizer = Tokenizer::from_json(file.to_string().as_bytes()).unwrap();
    let compiler = GrammarCompiler::new(&tokenizer, &[end]).unwrap();
    (tokenizer, compiler, end)
}

/// A generator of numbers (xorshift).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

/// Ids of the set bits.
pub(crate) fn ids(bits: &[u32]) -> Vec<u32> {
    (0..bits.len() as u32 * 32).filter(|id| bits[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

pub(crate) fn allowed(matcher: &mut Matcher, ids_max: usize) -> Vec<u32> {
    let mut bits = vec![0; ids_max.div_ceil(32)];
    let any = matcher.allowed(&mut bits);
    let ids = ids(&bits);
    assert_eq!(any, !ids.is_empty());
    ids
}

pub(crate) fn compile(answer: &Answer) -> Result<Grammar, GrammarError> {
    demo().1.compile(Some(answer), None)
}

/// A text drawn at random. After `soon` tokens the shortest way out is looked for: an end if allowed, else a
/// closing bracket or quote where there is one.
pub(crate) fn draw(grammar: &Grammar, seed: u64, soon: usize) -> Option<String> {
    let (tokenizer, _, ends) = demo();
    let mut matcher = grammar.matcher();
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut tokens = Vec::new();
    while tokens.len() < soon + 400 {
        let choices = allowed(&mut matcher, tokenizer.vocab_size());
        assert!(!choices.is_empty(), "dead end after {:?}", tokenizer.decode(&tokens, Specials::Keep));
        let may_end = choices.iter().any(|id| ends.contains(id));
        assert_eq!(may_end, matcher.can_end());
        let hurry = tokens.len() >= soon;
        if may_end && (hurry || choices.len() <= ends.len() || dice.below(4) == 0) {
            return Some(tokenizer.decode(&tokens, Specials::Keep));
        }
        let others: Vec<u32> = choices.into_iter().filter(|id| !ends.contains(id)).collect();
        let closes = |id: &&u32| {
            let bytes = tokenizer.token_bytes(**id).unwrap();
            let closing: &[&[u8]] = &[b"\"", b"}", b"]", b"\"}", b"</", b"\n", b"null"];
            closing.contains(&bytes) || tokenizer.control_content(**id) == Some("</tool_call>")
        };
        let token = match others.iter().find(closes) {
            Some(&token) if hurry && dice.below(3) > 0 => token,
            _ => others[dice.below(others.len())],
        };
        matcher.advance(token).unwrap();
        tokens.push(token);
    }
    None
}
