//! Reads values out of a mapping by key, and remembers everything that is wrong with it.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::duration::{format_duration, parse_duration};
use super::node::{Node, Step, quote};

/// Something wrong at a place of the tree.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) steps: Vec<Step>,
    pub(super) key: String,
    pub(super) message: String,
}

/// A value and where it is.
pub(super) struct Value<'n> {
    pub(super) node: &'n Node,
    steps: Vec<Step>,
    key: String,
}

impl<'n> Value<'n> {
    pub(super) fn document(node: &'n Node) -> Value<'n> {
        Value { node, steps: Vec::new(), key: String::new() }
    }

    fn entry(&self, index: usize, name: &str, node: &'n Node) -> Value<'n> {
        let mut steps = self.steps.clone();
        steps.push(Step::Entry(index));
        let key = if self.key.is_empty() { name.to_owned() } else { format!("{}.{name}", self.key) };
        Value { node, steps, key }
    }

    fn item(&self, index: usize, node: &'n Node) -> Value<'n> {
        let mut steps = self.steps.clone();
        steps.push(Step::Item(index));
        Value { node, steps, key: format!("{}[{index}]", self.key) }
    }

    /// Something is wrong with this value.
    pub(super) fn fault(&self, faults: &mut Faults, message: impl Into<String>) {
        faults.0.push(Fault { steps: self.steps.clone(), key: self.key.clone(), message: message.into() });
    }

    fn expected(&self, faults: &mut Faults, what: &str) {
        self.fault(faults, format!("expected {what}, found {}", self.node.describe()));
    }

    /// Whether the file says "none": `null` or the empty string.
    pub(super) fn is_none(&self) -> bool {
        matches!(self.node, Node::Null) || matches!(self.node, Node::Text(text) if text.is_empty())
    }

    fn text(&self, faults: &mut Faults, what: &str) -> Option<&'n str> {
        match self.node {
            Node::Text(text) => return Some(text),
            Node::Bool(_) | Node::Integer(_) | Node::Float(_) => {
                let found = self.node.describe();
                self.fault(faults, format!("expected {what}, found {found}: put it in quotes"));
            }
            _ => self.expected(faults, what),
        }
        None
    }

    /// A string that is not empty and has no control characters.
    pub(super) fn string(&self, faults: &mut Faults, what: &str) -> Option<&'n str> {
        let text = self.text(faults, what)?;
        if text.is_empty() || text.contains(char::is_control) {
            self.expected(faults, what);
            return None;
        }
        Some(text)
    }

    /// An absolute path.
    pub(super) fn path(&self, faults: &mut Faults) -> Option<PathBuf> {
        let text = self.string(faults, "an absolute path")?;
        if !Path::new(text).is_absolute() {
            self.expected(faults, "an absolute path");
            return None;
        }
        Some(text.into())
    }

    /// The items of a list; `null` is an empty one.
    pub(super) fn list(&self, faults: &mut Faults, what: &str) -> Vec<Value<'n>> {
        match self.node {
            Node::Null => Vec::new(),
            Node::List(items) => {
                items.iter().enumerate().map(|(index, node)| self.item(index, node)).collect()
            }
            _ => {
                self.expected(faults, what);
                Vec::new()
            }
        }
    }

    /// The entries of a mapping; `null` is an empty one. `None` when it is something else.
    pub(super) fn table(self, faults: &mut Faults) -> Option<Table<'n>> {
        let entries = match self.node {
            Node::Null => &[],
            Node::Table(entries) => entries.as_slice(),
            _ => {
                self.expected(faults, "a mapping of keys to values");
                return None;
            }
        };
        Some(Table { whole: self, entries, known: Vec::new() })
    }
}

/// Everything that is wrong, in the order in which it was found.
#[derive(Debug, Default)]
pub(super) struct Faults(pub(super) Vec<Fault>);

/// A mapping that is being read. [`Table::end`] reports the keys that nobody asked for.
pub(super) struct Table<'n> {
    whole: Value<'n>,
    entries: &'n [(Node, Node)],
    known: Vec<&'static str>,
}

impl<'n> Table<'n> {
    /// The value of a key, where the file has it.
    pub(super) fn get(&mut self, name: &'static str) -> Option<Value<'n>> {
        self.known.push(name);
        let is_it = |(key, _): &(Node, Node)| matches!(key, Node::Text(text) if text == name);
        let index = self.entries.iter().position(is_it)?;
        Some(self.whole.entry(index, name, &self.entries[index].1))
    }

    /// Every entry, for mappings whose keys are data.
    pub(super) fn entries(&self, faults: &mut Faults) -> Vec<(&'n str, Value<'n>)> {
        let mut all = Vec::new();
        for (index, (key, node)) in self.entries.iter().enumerate() {
            match key {
                Node::Text(name) => all.push((name.as_str(), self.whole.entry(index, name, node))),
                _ => self.fault_at_key(faults, index, &format!("expected a key, found {}", key.describe())),
            }
        }
        self.report_duplicates(faults);
        all
    }

    /// Something is wrong with the mapping as a whole.
    pub(super) fn fault(&self, faults: &mut Faults, message: impl Into<String>) {
        self.whole.fault(faults, message);
    }

    /// Reports a missing key.
    pub(super) fn missing(&self, faults: &mut Faults, name: &str) {
        self.fault(faults, format!("the key `{name}` is missing"));
    }

    pub(super) fn boolean(&mut self, faults: &mut Faults, name: &'static str, into: &mut bool) {
        let Some(value) = self.get(name) else { return };
        match value.node {
            Node::Bool(given) => *into = *given,
            _ => value.expected(faults, "`true` or `false`"),
        }
    }

    pub(super) fn duration(
        &mut self,
        faults: &mut Faults,
        name: &'static str,
        allowed: RangeInclusive<Duration>,
        into: &mut Duration,
    ) {
        let Some(value) = self.get(name) else { return };
        let expected = "a duration such as `15s`, `1m30s`, `500ms` or `2h`";
        let Node::Text(text) = value.node else { return value.expected(faults, expected) };
        let Ok(given) = parse_duration(text) else { return value.expected(faults, expected) };
        if !allowed.contains(&given) {
            let (least, most) = (format_duration(*allowed.start()), format_duration(*allowed.end()));
            let found = value.node.describe();
            return value.fault(faults, format!("expected a duration from {least} to {most}, found {found}"));
        }
        *into = given;
    }

    pub(super) fn number<T: TryFrom<i128> + Copy>(
        &mut self,
        faults: &mut Faults,
        name: &'static str,
        allowed: RangeInclusive<i128>,
        into: &mut T,
    ) {
        let Some(value) = self.get(name) else { return };
        let given = match value.node {
            Node::Integer(given) if allowed.contains(given) => T::try_from(*given).ok(),
            _ => None,
        };
        match given {
            Some(given) => *into = given,
            None => value
                .expected(faults, &format!("a whole number from {} to {}", allowed.start(), allowed.end())),
        }
    }

    /// A share: above 0, at most 1.
    pub(super) fn ratio(&mut self, faults: &mut Faults, name: &'static str, into: &mut f64) {
        let Some(value) = self.get(name) else { return };
        match value.node {
            Node::Float(given) if *given > 0.0 && *given <= 1.0 => *into = *given,
            Node::Integer(1) => *into = 1.0,
            _ => value.expected(faults, "a ratio above 0 and up to 1"),
        }
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(
        &mut self,
        faults: &mut Faults,
        name: &'static str,
        words: &[(&str, T)],
        into: &mut T,
    ) {
        let Some(value) = self.get(name) else { return };
        let given = match value.node {
            Node::Text(text) => words.iter().find(|(word, _)| word == text),
            _ => None,
        };
        if let Some((_, given)) = given {
            *into = *given;
        } else {
            let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            value.expected(faults, &any_of(&words));
        }
    }

    pub(super) fn path(&mut self, faults: &mut Faults, name: &'static str, into: &mut PathBuf) {
        if let Some(path) = self.get(name).and_then(|value| value.path(faults)) {
            *into = path;
        }
    }

    /// An absolute path, or none.
    pub(super) fn optional_path(
        &mut self,
        faults: &mut Faults,
        name: &'static str,
        into: &mut Option<PathBuf>,
    ) {
        let Some(value) = self.get(name) else { return };
        *into = if value.is_none() { None } else { value.path(faults).or(into.take()) };
    }

    /// A string, or none.
    pub(super) fn optional_string(
        &mut self,
        faults: &mut Faults,
        name: &'static str,
        what: &str,
        into: &mut Option<String>,
    ) {
        let Some(value) = self.get(name) else { return };
        *into = if value.is_none() {
            None
        } else {
            value.string(faults, what).map(str::to_owned).or(into.take())
        };
    }

    /// Reports duplicate keys and those that nobody asked for.
    pub(super) fn end(self, faults: &mut Faults) {
        for (index, (key, _)) in self.entries.iter().enumerate() {
            match key {
                Node::Text(name) if self.known.contains(&name.as_str()) => {}
                Node::Text(name) => {
                    let message = format!("unknown key {}, {}", quote(name), self.suggest(name));
                    self.fault_at_key(faults, index, &message);
                }
                _ => self.fault_at_key(faults, index, &format!("expected a key, found {}", key.describe())),
            }
        }
        self.report_duplicates(faults);
    }

    fn suggest(&self, name: &str) -> String {
        let near = self.known.iter().map(|known| (distance(name, known), known)).min();
        match near {
            Some((away, known)) if away <= 2 => format!("did you mean `{known}`?"),
            _ => format!("expected {}", any_of(&self.known)),
        }
    }

    fn report_duplicates(&self, faults: &mut Faults) {
        let mut seen = HashSet::new();
        for (index, (key, _)) in self.entries.iter().enumerate() {
            if let Node::Text(name) = key
                && !seen.insert(name)
            {
                self.fault_at_key(faults, index, &format!("the key {} is given twice", quote(name)));
            }
        }
    }

    fn fault_at_key(&self, faults: &mut Faults, index: usize, message: &str) {
        let mut steps = self.whole.steps.clone();
        steps.push(Step::Key(index));
        faults.0.push(Fault { steps, key: self.whole.key.clone(), message: message.to_owned() });
    }
}

/// `` `a`, `b` or `c` ``.
pub(super) fn any_of(words: &[&str]) -> String {
    let mut text = String::new();
    for (index, word) in words.iter().enumerate() {
        let joint = match index {
            0 => "",
            _ if index + 1 == words.len() => " or ",
            _ => ", ",
        };
        let _infallible = write!(text, "{joint}`{word}`");
    }
    text
}

/// Levenshtein distance; keys are short.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
