//! Limits: the answer to anything outside them comes at once, and never from a broken stack.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use text::{Answer, GrammarError, GrammarFault};

use crate::support::{allowed, compile, demo};

/// Compiles, and says how long that took. Time is judged generously: the machine may be busy.
fn timed(answer: &Answer) -> (Result<(), GrammarError>, Duration) {
    demo();
    let begin = Instant::now();
    let result = compile(answer).map(|_| ());
    (result, begin.elapsed())
}

fn too_complex(answer: &Answer, most: Duration) {
    let (result, time) = timed(answer);
    assert_eq!(result.unwrap_err().fault, GrammarFault::TooComplex);
    assert!(time < most, "{time:?}");
}

const SOON: Duration = Duration::from_millis(500);

/// A schema so deep that dropping it needs care, too.
struct Deep(Answer);

impl Deep {
    fn new(levels: usize, wrap: impl Fn(Value) -> Value) -> Self {
        Self(Answer::Schema((0..levels).fold(json!(true), |inner, _| wrap(inner))))
    }
}

impl Drop for Deep {
    fn drop(&mut self) {
        let Answer::Schema(schema) = &mut self.0 else { return };
        let mut open = vec![schema.take()];
        while let Some(value) = open.pop() {
            match value {
                Value::Array(items) => open.extend(items),
                Value::Object(map) => open.extend(map.into_iter().map(|(_, value)| value)),
                _ => {}
            }
        }
    }
}

#[test]
fn sixty_thousand_levels() {
    let items = |inner| Value::Object([("items".to_owned(), inner)].into_iter().collect());
    too_complex(&Deep::new(60_000, items).0, SOON);
    too_complex(&Deep::new(60_000, |inner| Value::Array(vec![inner])).0, SOON);
    let parentheses = format!("{}a{}", "(".repeat(60_000), ")".repeat(60_000));
    too_complex(&Answer::Regex(parentheses.clone()), SOON);
    too_complex(&Answer::Schema(json!({"pattern": parentheses})), SOON);
    too_complex(&Answer::Regex(format!("{}a{}", "(".repeat(4_000), ")".repeat(4_000))), SOON);
}

#[test]
fn chains_of_references() {
    let chain = |length: usize| {
        let definitions = (0..length).map(|index| {
            let next = json!({"$ref": format!("#/$defs/d{}", index + 1)});
            (format!("d{index}"), json!({"type": "object", "properties": {"next": next}}))
        });
        let mut definitions: serde_json::Map<String, Value> = definitions.collect();
        definitions.insert(format!("d{length}"), json!({"type": "null"}));
        Answer::Schema(json!({"$ref": "#/$defs/d0", "$defs": definitions}))
    };
    timed(&chain(200)).0.unwrap();
    too_complex(&chain(3_000), SOON);
}

#[test]
fn sizes() {
    too_complex(&Answer::Schema(json!({"description": "x".repeat(300 << 10)})), SOON);
    too_complex(&Answer::Regex("a".repeat((8 << 10) + 1)), SOON);
    too_complex(&Answer::Choice(vec!["x".repeat(300 << 10)]), SOON);
    let many: Vec<String> = (0..1025).map(|index| index.to_string()).collect();
    assert_eq!(compile(&Answer::Choice(many)).unwrap_err().fault, GrammarFault::Invalid);
}

/// The largest of each kind, within a second on an idle machine.
#[test]
fn costly_constraints_are_compiled_or_refused_in_time() {
    let properties: serde_json::Map<String, Value> = (0..1_500)
        .map(|index| (format!("property_{index}"), json!({"type": "string", "maxLength": 40})))
        .collect();
    let anys = |depth: usize| {
        (0..depth).fold(json!({"type": "object", "properties": {"a": {"type": "string"}}}), |inner, index| {
            let other = json!({"type": "object", "properties": {format!("b{index}"): {"minimum": index}}});
            json!({"allOf": [{"anyOf": [inner.clone(), other.clone()]}, {"anyOf": [inner, other]}]})
        })
    };
    let choices = (0..1024).map(|index| format!("{:0200}", index * 7919)).collect();
    let values: Vec<String> = (0..5_000).map(|index| format!("value {}", index * 7919 % 5_003)).collect();
    let big = json!({"type": "object", "properties": properties});
    let counts: Vec<Value> = (0..2_000).map(|index| json!({"minItems": index})).collect();
    for answer in [
        Answer::Schema(json!({"type": "array", "items": big.clone(), "anyOf": counts})),
        Answer::Schema(big),
        Answer::Schema(json!({"enum": values})),
        Answer::Schema(anys(5)),
        Answer::Schema(json!({"type": "string", "maxLength": 1 << 20, "minLength": 1 << 19})),
        Answer::Schema(json!({"type": "string", "pattern": "^(a{1,1000}){1,1000}$", "maxLength": 500})),
        Answer::Schema(
            json!({"type": "array", "minItems": 60_000, "maxItems": 65_536, "items": {"type": "integer"}}),
        ),
        Answer::Regex("(?:(?:(?:a{0,900}b{0,900}){0,900}c){0,900}d){0,900}".into()),
        Answer::Regex("(?:a|b)*a(?:a|b){200}".into()),
        Answer::Regex("\\p{L}{1,500}|\\p{N}{3,400}|[^a]{0,999}".into()),
        Answer::Choice(choices),
    ] {
        let (result, time) = timed(&answer);
        assert!(time < Duration::from_secs(5), "{time:?}");
        if let Err(error) = result {
            assert_eq!(error.fault, GrammarFault::TooComplex, "{error}");
        }
    }
}

/// Masks stay quick along the way, too, or the reply ends in a dead end; they never hang.
#[test]
fn costly_constraints_while_they_run() {
    let (tokenizer, _, _) = demo();
    for answer in [
        Answer::Regex("(?:a|b)*a(?:a|b){200}".into()),
        Answer::Regex("(?:(?:(?:a{0,900}b{0,900}){0,900}c){0,900}d){0,900}".into()),
        Answer::Schema(json!({"type": "string", "pattern": "(a|b)*a(a|b){100}(c|d)*c(c|d){100}"})),
    ] {
        let Ok(grammar) = compile(&answer) else { continue };
        let mut matcher = grammar.matcher();
        for round in 0..60 {
            let begin = Instant::now();
            let choices = allowed(&mut matcher, tokenizer.vocab_size());
            assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
            let Some(&token) = choices.get(round * 31 % choices.len().max(1)) else { break };
            matcher.advance(token).unwrap();
        }
    }
}
