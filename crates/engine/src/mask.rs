//! Token constraints: all the engine knows of grammars and forced tokens is bits.

/// What a [`Mask`] says about the next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Every token may follow.
    All,
    /// Those whose bit is set.
    Some,
    /// None: the constraint has no way on.
    None,
}

/// A constraint on the tokens of one reply.
///
/// It stands after some tokens of the reply (at first after none) and can go on and back, so that the engine
/// can ask for the mask of every row of a draft window before it knows which rows are real. Answers depend on
/// the tokens only: drafted and serial runs then see the same masks.
pub trait Mask: Send {
    /// The tokens that may follow; sets their bits (one per id, lowest bit first) where the answer is
    /// [`Allowed::Some`]. `bits` arrives zeroed with room for the whole vocabulary.
    fn allowed(&mut self, bits: &mut [u32]) -> Allowed;
    /// Goes on by a token that [`Self::allowed`] allowed.
    fn advance(&mut self, token: u32);
    /// Takes back the last `count` tokens.
    fn rollback(&mut self, count: usize);
    /// An independent copy in the same state, for another choice of the same request.
    fn fork(&self) -> Box<dyn Mask>;
}
