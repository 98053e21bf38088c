//! A tokenizer's ids as a trie of bytes.

use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// Tokens longer than this cannot be drawn under a constraint, bytes: the trie counts depth in ten bits.
const TOKEN_BYTES_MAX: usize = 1000;
/// Most nodes of the trie: it counts them in 22 bits.
const NODES_MAX: usize = (1 << 22) - 1;
/// No byte of UTF-8; the trie marks ids without bytes with it.
const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// The trie, in the shape its users want it. One id past the tokenizer's own stands for the end.
pub(super) struct Vocabulary {
    trie: TokTrie,
}

impl Vocabulary {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let ids = tokenizer.vocab_size();
        let bytes_of = |id: u32| match tokenizer.token_bytes(id) {
            Some(bytes)
                if tokenizer.control_content(id).is_none()
                    && bytes.len() <= TOKEN_BYTES_MAX
                    && !bytes.contains(&MARK) =>
            {
                bytes.to_vec()
            }
            _ => Vec::new(),
        };
        let mut words: Vec<Vec<u8>> = (0..ids as u32).map(bytes_of).collect();
        let nodes: usize = words.iter().map(Vec::len).sum();
        if nodes > NODES_MAX {
            return Err(TextError::UnsupportedTokenizer {
                what: "the length of all tokens".to_owned(),
                found: format!("{nodes} bytes"),
                supported: "up to 4194303 bytes under a constraint",
            });
        }
        words.push(Vec::new());
        let info = TokRxInfo::new(words.len() as u32, ids as TokenId);
        Ok(Self { trie: TokTrie::from(&info, &words) })
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// Every spelling that stays within the grammar is allowed: the model chooses, as it does without one.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
