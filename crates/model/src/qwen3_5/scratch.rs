//! Activations of a step. The plan and the allocation are one function, so they cannot disagree.

use device::Buffer;

use super::config::Config;
use super::plan::Settings;
use super::sequence::KEPT_ROWS;

/// Every buffer of a forward pass; `R` is `rows_max`, `H` the width of the residual stream.
#[derive(Debug)]
pub(super) struct Scratch<B = Buffer> {
    /// Residual stream `[R, H]`.
    pub(super) x: B,
    /// Normed input of a mixer or of the experts `[R, H]`.
    pub(super) normed: B,
    /// What a mixer or the experts add to the residual stream `[R, H]`.
    pub(super) update: B,
    /// After the final norm `[R, H]`.
    pub(super) hidden: B,
    /// Rows of `hidden` that are scored `[L, H]`.
    pub(super) scored: B,
    /// `[L, V]`.
    pub(super) logits: B,
    pub(super) attention: AttentionScratch<B>,
    pub(super) delta: DeltaScratch<B>,
    pub(super) moe: MoeScratch<B>,
    pub(super) mtp: Option<MtpScratch<B>>,
}

#[derive(Debug)]
pub(super) struct AttentionScratch<B = Buffer> {
    /// `[R, heads, 2, head_dim]`, query then gate.
    pub(super) qg: B,
    /// `[R, heads, head_dim]`.
    pub(super) q: B,
    /// `[R, kv_heads, head_dim]`.
    pub(super) k: B,
    /// `[R, kv_heads, head_dim]`.
    pub(super) v: B,
    /// `[R, heads, head_dim]`.
    pub(super) attended: B,
}

#[derive(Debug)]
pub(super) struct DeltaScratch<B = Buffer> {
    /// `[R, C]`.
    pub(super) qkv: B,
    /// After the convolution `[R, C]`.
    pub(super) mixed: B,
    /// `[R, Hv, Dv]`.
    pub(super) z: B,
    /// `[R, Hv]`.
    pub(super) a: B,
    /// `[R, Hv]`.
    pub(super) b: B,
    /// `[R, Hv, Dv]`.
    pub(super) out: B,
}

#[derive(Debug)]
pub(super) struct MoeScratch<B = Buffer> {
    /// Router logits `[R, E]`.
    pub(super) router: B,
    /// `[R * k, H]`.
    pub(super) routed: B,
    /// `[R, I]`.
    pub(super) gate: B,
    /// `[R, I]`.
    pub(super) up: B,
    /// `[R, I]`.
    pub(super) inner: B,
    /// `[R, H]`.
    pub(super) shared: B,
    /// Gate of the shared expert `[R, 1]`.
    pub(super) shared_gate: B,
}

#[derive(Debug)]
pub(super) struct MtpScratch<B = Buffer> {
    /// Embeddings of the next tokens `[R, H]`.
    pub(super) embedding: B,
    /// Hidden states `[R, H]`.
    pub(super) hidden: B,
    /// Both, normed `[R, 2H]`.
    pub(super) joined: B,
    /// Residual stream of the rows whose result is wanted `[R, H]`.
    pub(super) residual: B,
    /// Their results, after the last norm `[R, H]`.
    pub(super) drafted: B,
    /// Hidden states of the model that wait for their next token or for a forward of the layer, a ring of
    /// `KEPT_ROWS` rows per slot `[slots * KEPT_ROWS, H]`.
    pub(super) kept: B,
    /// The pending hidden state of every snapshot, at least one row `[snapshots, H]`.
    pub(super) saved: B,
}

impl<B> Scratch<B> {
    /// Makes every buffer with `make(rows, width)`.
    pub(super) fn build<E>(
        config: &Config,
        settings: &Settings,
        mtp: bool,
        mut make: impl FnMut(usize, usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let (rows, h) = (settings.rows_max, config.hidden);
        // Drafts of all slots are scored together.
        let scored = settings.logits_rows_max.max(if mtp { settings.slots } else { 0 });
        let (a, d) = (config.attention, config.delta);
        let (q_width, kv_width) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let value_width = d.value_heads * d.value_dim;
        Ok(Self {
            x: make(rows, h)?,
            normed: make(rows, h)?,
            update: make(rows, h)?,
            hidden: make(rows, h)?,
            scored: make(scored, h)?,
            logits: make(scored, config.vocabulary)?,
            attention: AttentionScratch {
                qg: make(rows, 2 * q_width)?,
                q: make(rows, q_width)?,
                k: make(rows, kv_width)?,
                v: make(rows, kv_width)?,
                attended: make(rows, q_width)?,
            },
            delta: DeltaScratch {
                qkv: make(rows, d.channels())?,
                mixed: make(rows, d.channels())?,
                z: make(rows, value_width)?,
                a: make(rows, d.value_heads)?,
                b: make(rows, d.value_heads)?,
                out: make(rows, value_width)?,
            },
            moe: MoeScratch {
                router: make(rows, config.experts)?,
                routed: make(rows * config.picks, h)?,
                gate: make(rows, config.shared_width)?,
                up: make(rows, config.shared_width)?,
                inner: make(rows, config.shared_width)?,
                shared: make(rows, h)?,
                shared_gate: make(rows, 1)?,
            },
            mtp: match mtp {
                true => Some(MtpScratch {
                    embedding: make(rows, h)?,
                    hidden: make(rows, h)?,
                    joined: make(rows, 2 * h)?,
                    residual: make(rows, h)?,
                    drafted: make(rows, h)?,
                    kept: make(settings.slots * KEPT_ROWS, h)?,
                    saved: make(settings.snapshots.max(1), h)?,
                }),
                false => None,
            },
        })
    }
}
