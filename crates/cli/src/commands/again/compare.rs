//! Two receipts side by side.

use serde_json::Value;
use server::http::Receipt;
use text::{Specials, Tokenizer};

use super::seen::Parting;
use crate::args::Kv;

/// Where two receipts part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Member of the receipt.
    pub(crate) what: &'static str,
    /// What is different, in words.
    pub(crate) message: String,
    /// For a difference in the output.
    pub(crate) place: Option<Place>,
}

/// Where in the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Choice and token.
    Token(usize, usize),
    /// Member of the reply and character.
    Text(String, usize),
}

impl Difference {
    /// A reply whose text is not what its tokens say.
    pub(crate) fn text(parting: Parting) -> Self {
        let place = Some(Place::Text(parting.place, parting.character));
        Self { what: "text", message: parting.message, place }
    }

    pub(crate) fn new(what: &'static str, message: impl Into<String>) -> Self {
        Self { what, message: message.into(), place: None }
    }

    fn member(what: &'static str, then: &str, now: &str) -> Self {
        Self::new(what, format!("{what} is {then} in the receipt, {now} here"))
    }

    /// How to go on.
    pub(crate) fn hint(&self) -> &'static str {
        match self.what {
            "text" => "the tokens are equal: somebody changed the text after it was written",
            "receipt" => "somebody changed the receipt after it was written",
            "model" | "tokenizer" | "template" => "name the folder that the reply was made with",
            "kv" => "leave --kv out: the receipt's is taken then",
            "seed" | "params" | "images" => "is this the request of the receipt, word for word?",
            "prompt" => {
                "is this the request of the receipt? --thinking and --template-kwargs must be the server's"
            }
            _ => "the receipt was changed, or this is a fault: `clary eval exact MODEL` looks for one here",
        }
    }
}

/// The word for a form of the K/V cache.
pub(crate) fn kv_name(kv: Kv) -> &'static str {
    match kv {
        Kv::Int8 => "int8",
        Kv::Int16 => "int16",
    }
}

/// What can be said of a receipt alone.
pub(crate) fn before(receipt: &Receipt, kv: Option<Kv>) -> Option<Difference> {
    if let Some(member) = receipt.contradiction() {
        let message = format!("the receipt contradicts itself: {member} is not the digest of what it lists");
        return Some(Difference::new("receipt", message));
    }
    let kv = kv.map(kv_name).filter(|kv| *kv != receipt.kv)?;
    Some(Difference::member("kv", &receipt.kv, kv))
}

/// The first difference, the causes before what they lead to.
pub(crate) fn after(then: &Receipt, now: &Receipt, tokenizer: &Tokenizer) -> Option<Difference> {
    let seed = || Difference::member("seed", &then.seed.to_string(), &now.seed.to_string());
    if then.seed != now.seed {
        return Some(seed());
    }
    params(then, now)
        .or_else(|| {
            (then.images != now.images).then(|| {
                let (then, now) = (then.images.len(), now.images.len());
                Difference::new("images", format!("{then} pictures in the receipt, {now} here, or others"))
            })
        })
        .or_else(|| {
            (then.prompt != now.prompt).then(|| Difference::member("prompt", &then.prompt, &now.prompt))
        })
        .or_else(|| output(then, now, tokenizer))
}

fn params(then: &Receipt, now: &Receipt) -> Option<Difference> {
    if then.params == now.params {
        return None;
    }
    let fields = |receipt: &Receipt| match serde_json::to_value(&receipt.sampling) {
        Ok(Value::Object(map)) => map,
        _ => serde_json::Map::new(),
    };
    let (then_fields, now_fields) = (fields(then), fields(now));
    let other = then_fields.iter().find(|(name, value)| now_fields.get(*name) != Some(value));
    Some(match other {
        Some((name, value)) => {
            let now = now_fields.get(name).unwrap_or(&Value::Null);
            Difference::new("params", format!("{name} is {value} in the receipt, {now} here"))
        }
        None => Difference::member("params", &then.params, &now.params),
    })
}

fn output(then: &Receipt, now: &Receipt, tokenizer: &Tokenizer) -> Option<Difference> {
    if then.output == now.output && then.output_ids == now.output_ids {
        return None;
    }
    let token = |id: Option<&u32>| match id {
        Some(id) => format!("{id} ({:?})", tokenizer.decode(&[*id], Specials::Keep)),
        None => "the end of the reply".to_owned(),
    };
    let choices = then.output_ids.len().max(now.output_ids.len());
    let ids = |receipt: &Receipt, choice: usize| receipt.output_ids.get(choice).cloned().unwrap_or_default();
    let first = (0..choices).find_map(|choice| {
        let (then, now) = (ids(then, choice), ids(now, choice));
        let at = then.iter().zip(&now).take_while(|(a, b)| a == b).count();
        (then.len() != at || now.len() != at).then(|| (choice, at, token(then.get(at)), token(now.get(at))))
    });
    let (choice, at, then, now) = first?;
    let message = format!("reply {choice}, token {at}: {then} in the receipt, {now} here");
    Some(Difference { what: "output", message, place: Some(Place::Token(choice, at)) })
}

/// What is different and changes no bit.
pub(crate) fn notes(then: &Receipt, now: &Receipt) -> Vec<String> {
    let members = [
        ("version", &then.version, &now.version),
        ("build", &then.build, &now.build),
        ("device", &then.device, &now.device),
    ];
    let other = members.into_iter().filter(|(_, then, now)| then != now);
    other.map(|(name, then, now)| format!("{name} is {then:?} in the receipt, {now:?} here")).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer() -> Tokenizer {
        Tokenizer::open(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"))).unwrap()
    }

    #[test]
    fn the_first_difference_is_named() {
        let tokenizer = tokenizer();
        let then =
            Receipt { output: "a".into(), output_ids: vec![vec![1, 2], vec![3]], ..Receipt::default() };
        let check = |now: Receipt, what: &str, place: Option<Place>, text: &str| {
            let difference = after(&then, &now, &tokenizer).unwrap();
            assert_eq!((difference.what, &difference.place), (what, &place), "{difference:?}");
            assert!(difference.message.contains(text), "{difference:?}");
        };
        assert_eq!(after(&then, &then, &tokenizer), None);
        let ids = |ids: Vec<Vec<u32>>| Receipt { output: "b".into(), output_ids: ids, ..then.clone() };
        check(ids(vec![vec![1, 4], vec![5]]), "output", Some(Place::Token(0, 1)), "reply 0, token 1: 2 (");
        check(ids(vec![vec![1, 2], vec![]]), "output", Some(Place::Token(1, 0)), "the end of the reply here");
        check(
            ids(vec![vec![1, 2, 9], vec![3]]),
            "output",
            Some(Place::Token(0, 2)),
            "the end of the reply in the receipt",
        );
        check(Receipt { seed: 4, ..then.clone() }, "seed", None, "seed is 0 in the receipt, 4 here");
        let mut params = Receipt { params: "x".into(), ..then.clone() };
        params.sampling.top_k = 5;
        check(params, "params", None, "top_k is 0 in the receipt, 5 here");
        check(Receipt { prompt: "p".into(), ..then.clone() }, "prompt", None, "p here");
    }
}
