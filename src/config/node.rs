//! A YAML document as a tree, and where in the text a place of that tree is.
//!
//! The YAML crate tells the line of an error, but not of a value that it accepted. So a place is found again, when
//! it is needed, by walking the document to it and refusing what is there.

use std::fmt;

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, EnumAccess, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

/// A value of the document.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    /// In the order of the file, duplicate keys included.
    Table(Vec<(Node, Node)>),
}

impl Node {
    /// What a person would call it, with short values quoted: `the string "5 sec"`.
    pub(super) fn describe(&self) -> String {
        match self {
            Node::Null => "nothing".into(),
            Node::Bool(value) => format!("the boolean {value}"),
            Node::Integer(value) => format!("the number {value}"),
            Node::Float(value) => format!("the number {value}"),
            Node::Text(text) => format!("the string {}", quote(text)),
            Node::List(_) => "a list".into(),
            Node::Table(_) => "a mapping".into(),
        }
    }
}

/// The text in quotes, cut when it is long.
pub(super) fn quote(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{:?}…", &text[..cut]),
        None => format!("{text:?}"),
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Integer(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Integer(value.into()))
    }

    fn visit_i128<E: Error>(self, value: i128) -> Result<Node, E> {
        Ok(Node::Integer(value))
    }

    fn visit_u128<E: Error>(self, value: u128) -> Result<Node, E> {
        Ok(Node::Integer(i128::try_from(value).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(value.to_owned()))
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Node, E> {
        Ok(Node::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node, A::Error> {
        let mut table = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            table.push(entry);
        }
        Ok(Node::Table(table))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, _tagged: A) -> Result<Node, A::Error> {
        Err(A::Error::custom("YAML tags (`!name`) mean nothing here, remove the tag"))
    }
}

/// A step from a node to one inside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The value of the n-th entry of a mapping, counted from 0.
    Entry(usize),
    /// The key of the n-th entry; always the last step.
    Key(usize),
    /// The n-th item of a list, counted from 0.
    Item(usize),
}

/// Line and column of the place, both counted from 1. `None` when the document ends before it.
pub(super) fn locate(text: &str, steps: &[Step]) -> Option<(usize, usize)> {
    let refused = Seek(steps).deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
    let location = refused.location()?;
    Some((location.line(), location.column()))
}

/// Walks to a place and refuses what it finds there.
struct Seek<'s>(&'s [Step]);

fn arrive<T, E: Error>() -> Result<T, E> {
    Err(E::custom("here"))
}

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing at this place")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Some((Step::Item(index), rest)) = self.0.split_first() else { return arrive() };
        for _ in 0..*index {
            items.next_element::<IgnoredAny>()?;
        }
        items.next_element_seed(Seek(rest))?;
        arrive()
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<(), A::Error> {
        let (index, rest) = match self.0.split_first() {
            Some((Step::Entry(index) | Step::Key(index), rest)) => (*index, rest),
            _ => return arrive(),
        };
        for _ in 0..index {
            entries.next_entry::<IgnoredAny, IgnoredAny>()?;
        }
        if matches!(self.0[0], Step::Key(_)) {
            entries.next_key_seed(Seek(&[]))?;
        } else if entries.next_key::<IgnoredAny>()?.is_some() {
            entries.next_value_seed(Seek(rest))?;
        }
        arrive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_place_is_found() {
        let text = "a: 1\nb:\n  - x\n  - {k: v, w: [1, 2]}\nc: &anchor\n  d: e\nf: *anchor\n";
        for (steps, place) in [
            (vec![Step::Key(0)], (1, 1)),
            (vec![Step::Entry(0)], (1, 4)),
            (vec![Step::Key(1)], (2, 1)),
            (vec![Step::Entry(1), Step::Item(0)], (3, 5)),
            (vec![Step::Entry(1), Step::Item(1), Step::Key(1)], (4, 12)),
            (vec![Step::Entry(1), Step::Item(1), Step::Entry(1), Step::Item(1)], (4, 19)),
            (vec![Step::Entry(2), Step::Entry(0)], (6, 6)),
            (vec![Step::Entry(3), Step::Entry(0)], (6, 6)),
        ] {
            assert_eq!(locate(text, &steps), Some(place), "{steps:?}");
        }
    }
}
