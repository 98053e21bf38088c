//! What the model reads from a checkpoint, in canonical names (`docs/formats.md` section 2).

use checkpoint::{Expected, Kind, Projection, Source};

use super::config::{Config, MixerKind};
use super::names::{HEAD, Layer, MTP, MTP_EMBED, MTP_HEAD, NORM, TABLE, VISION};
use super::vision_config::VisionConfig;

/// Which optional parts a checkpoint stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts {
    /// An `lm_head` of its own.
    pub head: bool,
    /// The MTP layer.
    pub mtp: bool,
    /// The vision tower.
    pub vision: bool,
}

impl Parts {
    /// Looks at what is there.
    pub fn of(config: &Config, source: &dyn Source) -> Self {
        Self {
            head: source.contains(HEAD),
            mtp: config.mtp_layers > 0 && source.has_mtp(),
            vision: config.vision.is_some() && source.contains(&format!("{VISION}merger.linear_fc2")),
        }
    }
}

/// Everything the model reads, in load order: table, head, layers, final norm, MTP, vision.
pub fn inventory(config: &Config, parts: Parts) -> Vec<Expected> {
    let mut list = List { needed_by: "the token table".into(), items: Vec::new() };
    let h = config.hidden;
    list.matrix(TABLE, config.vocabulary, h);
    if !config.tied(parts.head) {
        list.needed_by = "the head (tie_word_embeddings is false)".into();
        list.matrix(HEAD, config.vocabulary, h);
    }
    for (layer, kind) in config.layers.iter().enumerate() {
        list.needed_by = format!("layer {layer}");
        list.layer(config, &Layer::text(layer), *kind);
    }
    list.needed_by = "the final norm".into();
    list.norm(NORM, h);
    if parts.mtp {
        list.needed_by = "the MTP layer".into();
        list.mtp(config);
    }
    if let Some(vision) = config.vision.as_ref().filter(|_| parts.vision) {
        list.needed_by = "the vision tower".into();
        list.vision(vision);
    }
    list.items
}

struct List {
    needed_by: String,
    items: Vec<Expected>,
}

impl List {
    fn push(&mut self, name: &str, kind: Kind) {
        self.items.push(Expected::new(name, kind, self.needed_by.clone()));
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) {
        self.push(name, Kind::Matrix { rows, cols });
    }

    fn norm(&mut self, name: &str, len: usize) {
        self.push(name, Kind::Norm { len });
    }

    fn vector(&mut self, name: &str, shape: &[usize]) {
        self.push(name, Kind::Vector { shape: shape.to_vec() });
    }

    fn layer(&mut self, config: &Config, layer: &Layer, kind: MixerKind) {
        let h = config.hidden;
        self.norm(&layer.input_norm(), h);
        match kind {
            MixerKind::DeltaNet => self.delta_net(config, layer),
            MixerKind::Attention => self.attention(config, layer),
        }
        self.norm(&layer.post_norm(), h);
        self.matrix(&layer.mlp("gate"), config.experts, h);
        for projection in Projection::ALL {
            let (rows, cols) = match projection {
                Projection::Gate | Projection::Up => (config.expert_width, h),
                Projection::Down => (h, config.expert_width),
            };
            let experts = config.experts;
            self.push(&layer.mlp_path(), Kind::Experts { projection, experts, rows, cols });
        }
        self.matrix(&layer.mlp("shared_expert.gate_proj"), config.shared_width, h);
        self.matrix(&layer.mlp("shared_expert.up_proj"), config.shared_width, h);
        self.matrix(&layer.mlp("shared_expert.down_proj"), h, config.shared_width);
        self.matrix(&layer.mlp("shared_expert_gate"), 1, h);
    }

    fn delta_net(&mut self, config: &Config, layer: &Layer) {
        let (h, d) = (config.hidden, config.delta);
        let width = d.value_heads * d.value_dim;
        self.matrix(&layer.delta("in_proj_qkv"), d.channels(), h);
        self.matrix(&layer.delta("in_proj_z"), width, h);
        self.matrix(&layer.delta("in_proj_a"), d.value_heads, h);
        self.matrix(&layer.delta("in_proj_b"), d.value_heads, h);
        self.vector(&layer.delta("conv1d.weight"), &[d.channels(), 1, d.conv_taps]);
        self.vector(&layer.delta("A_log"), &[d.value_heads]);
        self.vector(&layer.delta("dt_bias"), &[d.value_heads]);
        self.vector(&layer.delta("norm.weight"), &[d.value_dim]);
        self.matrix(&layer.delta("out_proj"), h, width);
    }

    fn attention(&mut self, config: &Config, layer: &Layer) {
        let (h, a) = (config.hidden, config.attention);
        self.matrix(&layer.attention("q_proj"), 2 * a.heads * a.head_dim, h);
        self.matrix(&layer.attention("k_proj"), a.kv_heads * a.head_dim, h);
        self.matrix(&layer.attention("v_proj"), a.kv_heads * a.head_dim, h);
        self.norm(&layer.attention("q_norm.weight"), a.head_dim);
        self.norm(&layer.attention("k_norm.weight"), a.head_dim);
        self.matrix(&layer.attention("o_proj"), h, a.heads * a.head_dim);
    }

    fn mtp(&mut self, config: &Config) {
        let h = config.hidden;
        self.matrix(&format!("{MTP}fc"), h, 2 * h);
        for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            self.norm(&format!("{MTP}{norm}.weight"), h);
        }
        self.layer(config, &Layer::mtp(), MixerKind::Attention);
        for copy in [MTP_EMBED, MTP_HEAD] {
            let kind = Kind::Matrix { rows: config.vocabulary, cols: h };
            self.items.push(Expected::new(copy, kind, self.needed_by.clone()).optional());
        }
    }

    fn vision(&mut self, v: &VisionConfig) {
        let name = |rest: &str| format!("{VISION}{rest}");
        let w = v.hidden;
        self.vector(&name("patch_embed.proj.weight"), &[w, v.channels, v.frames, v.patch, v.patch]);
        self.vector(&name("patch_embed.proj.bias"), &[w]);
        self.vector(&name("pos_embed.weight"), &[v.table_side * v.table_side, w]);
        for block in 0..v.depth {
            let name = |rest: &str| format!("{VISION}blocks.{block}.{rest}");
            for norm in ["norm1", "norm2"] {
                self.vector(&name(&format!("{norm}.weight")), &[w]);
                self.vector(&name(&format!("{norm}.bias")), &[w]);
            }
            self.biased(&name("attn.qkv"), 3 * w, w);
            self.biased(&name("attn.proj"), w, w);
            self.biased(&name("mlp.linear_fc1"), v.intermediate, w);
            self.biased(&name("mlp.linear_fc2"), w, v.intermediate);
        }
        self.vector(&name("merger.norm.weight"), &[w]);
        self.vector(&name("merger.norm.bias"), &[w]);
        self.biased(&name("merger.linear_fc1"), v.merged(), v.merged());
        self.biased(&name("merger.linear_fc2"), v.out, v.merged());
    }

    fn biased(&mut self, name: &str, rows: usize, cols: usize) {
        self.matrix(name, rows, cols);
        self.vector(&format!("{name}.bias"), &[rows]);
    }
}
