//! Receipts (`docs/api.md` 3.8): what a reply was made from and what it came to, as digests, so that anyone
//! with the model's files and the request can make it again and compare.

use engine::Sampling;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::ids::hex;
use super::running::Job;
use super::state::{Served, VERSION};

/// What a reply was made from, and what it came to. Digests are `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Receipt {
    /// Version of the program.
    pub version: String,
    /// Digest of the model's files.
    pub model: String,
    /// Digest of the chat template's text.
    pub template: String,
    /// Digest of `tokenizer.json`.
    pub tokenizer: String,
    /// Commit the program was built from.
    pub build: String,
    /// Name of the device. No bit depends on it.
    pub device: String,
    /// `int8` or `int16`.
    pub kv: String,
    /// Digest of `sampling` as canonical JSON.
    pub params: String,
    /// Digest of the prompt's ids as little-endian u32; several prompts follow each other.
    pub prompt: String,
    /// Digests of the pictures, in the prompt's order.
    pub images: Vec<String>,
    /// Digest of the generated ids as little-endian u32; several choices follow each other.
    pub output: String,
    /// Key of every draw.
    pub seed: u64,
    /// Route of the request.
    #[serde(default)]
    pub route: String,
    /// Tokens of the slot's context: where a reply without a limit of its own must end.
    #[serde(default)]
    pub context: usize,
    /// How tokens were drawn and what could end the reply, the server's defaults resolved.
    #[serde(default)]
    pub sampling: ResolvedSampling,
    /// The generated ids of each choice: what a comparison needs to name the first difference.
    #[serde(default)]
    pub output_ids: Vec<Vec<u32>>,
}

/// Sampling parameters with all defaults resolved. The fields stand in alphabetical order: written without
/// white space this is the canonical JSON that `params` is the digest of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolvedSampling {
    /// The reply cannot end inside its reasoning.
    #[serde(default)]
    pub close_reasoning: bool,
    /// -2 to 2, over generated tokens.
    pub frequency_penalty: f32,
    /// The model's end tokens do not end the reply.
    pub ignore_eos: bool,
    /// A matched stop string stays in the text. It ends the reply in either case.
    pub include_stop_str_in_output: bool,
    /// Id and bias, by id.
    #[schema(value_type = Vec<Object>)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Most tokens of the reply; null is the rest of the context.
    pub max_tokens: Option<usize>,
    /// Least share of the best token's probability.
    pub min_p: f32,
    /// Replies to each prompt.
    pub n: u32,
    /// -2 to 2, over generated tokens.
    pub presence_penalty: f32,
    /// Above 0, at most 10, over prompt and generated tokens.
    pub repetition_penalty: f32,
    /// The first complete call ends the reply.
    pub single_call: bool,
    /// Strings that end the reply.
    pub stop: Vec<String>,
    /// Stop strings are matched in reasoning too.
    pub stop_in_reasoning: bool,
    /// Ids that end the reply.
    pub stop_token_ids: Vec<u32>,
    /// 0 is greedy.
    pub temperature: f32,
    /// Most tokens of reasoning; null is no limit.
    pub thinking_budget: Option<usize>,
    /// 0 is off.
    pub top_k: u32,
    /// Above 0, at most 1.
    pub top_p: f32,
}

impl ResolvedSampling {
    fn of(job: &Job) -> Self {
        let Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            presence,
            frequency,
            repetition,
            ref logit_bias,
            seed: _,
            ref stop_ids,
            ignore_eos,
        } = job.sampling;
        let reader = &job.reader;
        Self {
            close_reasoning: job.close_reasoning,
            frequency_penalty: frequency,
            ignore_eos,
            include_stop_str_in_output: reader.include_stop,
            logit_bias: logit_bias.clone(),
            max_tokens: job.max_tokens,
            min_p,
            n: job.choices,
            presence_penalty: presence,
            repetition_penalty: repetition,
            single_call: reader.single_call,
            stop: reader.stop.clone(),
            stop_in_reasoning: reader.stop_in_reasoning,
            stop_token_ids: stop_ids.clone(),
            temperature,
            thinking_budget: job.thinking_budget,
            top_k,
            top_p,
        }
    }

    /// Digest of the canonical JSON.
    pub fn digest(&self) -> String {
        digest(serde_json::to_vec(self).expect("own types have a JSON form"))
    }
}

impl Receipt {
    /// All that is known before the reply.
    pub(crate) fn open(served: &Served, route: &str, job: &Job) -> Self {
        let (info, text) = (&served.info, served.session.text());
        let sampling = ResolvedSampling::of(job);
        let pictures = job.prompts.iter().flat_map(|prompt| &prompt.pictures);
        Self {
            version: VERSION.to_owned(),
            model: info.digest.clone(),
            template: format!("sha256:{}", text.template.digest()),
            tokenizer: format!("sha256:{}", text.tokenizer.digest()),
            build: info.build.clone(),
            device: info.device.clone(),
            kv: info.kv.clone(),
            params: sampling.digest(),
            prompt: ids_digest(job.prompts.iter().map(|prompt| prompt.ids.as_slice())),
            images: pictures.map(|(_, picture)| written_bytes(&picture.digest)).collect(),
            output: String::new(),
            seed: job.sampling.seed,
            route: route.to_owned(),
            context: served.context(),
            sampling,
            output_ids: Vec::new(),
        }
    }

    /// The same with the generated ids of each choice.
    pub(crate) fn close(&self, output_ids: Vec<Vec<u32>>) -> Self {
        let output = ids_digest(output_ids.iter().map(Vec::as_slice));
        Self { output, output_ids, ..self.clone() }
    }

    /// What in this receipt contradicts itself: the name of a digest that is not that of what it stands for.
    pub fn contradiction(&self) -> Option<&'static str> {
        let is_output = ids_digest(self.output_ids.iter().map(Vec::as_slice)) == self.output;
        if self.sampling.digest() != self.params {
            return Some("params");
        }
        (!is_output).then_some("output")
    }
}

/// `sha256:` and the digest of lists of ids, little-endian, one after the other.
pub fn ids_digest<'a>(lists: impl Iterator<Item = &'a [u32]>) -> String {
    let mut hash = Sha256::new();
    for ids in lists {
        // In one piece: a long prompt is hashed while its request waits.
        hash.update(ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    }
    written(hash)
}

fn digest(bytes: Vec<u8>) -> String {
    written(Sha256::new().chain_update(bytes))
}

fn written(hash: Sha256) -> String {
    written_bytes(&hash.finalize())
}

fn written_bytes(digest: &[u8]) -> String {
    format!("sha256:{}", hex(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_json_is_sorted_and_short() {
        let sampling = ResolvedSampling { temperature: 0.7, top_p: 0.95, n: 1, ..Default::default() };
        let text = serde_json::to_string(&sampling).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert!(keys.is_sorted(), "{text}");
        assert!(text.contains(r#""temperature":0.7,"#) && text.contains(r#""top_p":0.95}"#), "{text}");
        assert_eq!(serde_json::from_str::<ResolvedSampling>(&text).unwrap(), sampling);
        assert_ne!(ResolvedSampling { top_p: 0.9, ..sampling.clone() }.digest(), sampling.digest());
    }

    #[test]
    fn receipts_that_contradict_themselves() {
        let open = Receipt { params: ResolvedSampling::default().digest(), ..Receipt::default() };
        let receipt = open.close(vec![vec![1, 2], vec![]]);
        // printf '\x01\0\0\0\x02\0\0\0' | sha256sum
        let known = "sha256:34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f";
        assert_eq!((receipt.output.as_str(), receipt.contradiction()), (known, None));
        let forged = Receipt { output_ids: vec![vec![1, 3], vec![]], ..receipt.clone() };
        assert_eq!(forged.contradiction(), Some("output"));
        let sampling = ResolvedSampling { top_k: 3, ..ResolvedSampling::default() };
        assert_eq!(Receipt { sampling, ..receipt }.contradiction(), Some("params"));
    }
}
