//! Byte ranges that share an owner.

use std::{fmt, ops::Range, sync::Arc};

/// Something that owns bytes for as long as anybody looks at them.
pub trait Storage: Send + Sync {
    /// All bytes.
    fn bytes(&self) -> &[u8];
    /// The range will not be read again: its memory may be given back, and its bytes may become others.
    fn discard(&self, _range: Range<usize>) {}
}

impl Storage for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A shared, immutable range of bytes. Cloning copies no data. No alignment is promised: MLX files start
/// tensors at any offset.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Storage>,
    range: Range<usize>,
}

impl Bytes {
    /// The bytes `range` of `owner`; `None` if the range is not inside it.
    pub fn new(owner: Arc<dyn Storage>, range: Range<usize>) -> Option<Self> {
        owner.bytes().get(range.clone())?;
        Some(Self { owner, range })
    }

    /// A sub-range relative to this one; `None` if it is not inside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        self.get(range.clone())?;
        let start = self.range.start;
        Some(Self { owner: self.owner.clone(), range: start + range.start..start + range.end })
    }

    /// Tells the owner that nobody will look at these bytes again.
    pub fn discard(&self) {
        self.owner.discard(self.range.clone());
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { owner: Arc::new(bytes), range }
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.range.clone()]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.range.len())
    }
}
