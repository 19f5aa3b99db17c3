//! A strict parser of OpenMetrics 1.0 text: it refuses everything that the specification forbids.
//!
//! It is stricter than Prometheus on purpose, so that a page which it takes is taken everywhere.

// Infos and states are exactly 0 or 1.
#![allow(clippy::float_cmp)]

use std::collections::BTreeSet;

/// A parsed metric family.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Family {
    pub name: String,
    pub kind: String,
    pub unit: String,
    pub help: String,
    pub samples: Vec<Sample>,
}

/// A parsed sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Labels,
    pub value: f64,
    pub exemplar: Option<(Labels, f64, Option<f64>)>,
}

/// Names and values in the order of the page.
pub type Labels = Vec<(String, String)>;

/// Parses a whole page, or says what is wrong with it and in which line.
pub fn parse(page: &str) -> Result<Vec<Family>, String> {
    let body = page.strip_suffix("# EOF\n").ok_or("the page does not end in a line `# EOF`")?;
    if !(body.is_empty() || body.ends_with('\n')) {
        return Err("`# EOF` is not on a line of its own".into());
    }
    let mut families: Vec<Family> = Vec::new();
    for (number, line) in body.split_terminator('\n').enumerate() {
        parse_line(line, &mut families).map_err(|error| format!("line {}: {error}: {line}", number + 1))?;
    }
    let mut names = BTreeSet::new();
    for family in &families {
        check(family).map_err(|error| format!("family {}: {error}", family.name))?;
        for sample in possible_names(family) {
            if !names.insert(sample.clone()) {
                return Err(format!("the name {sample} belongs to two families"));
            }
        }
    }
    Ok(families)
}

fn parse_line(line: &str, families: &mut Vec<Family>) -> Result<(), String> {
    if line.is_empty() || line.contains('\r') {
        return Err("empty line or carriage return".into());
    }
    let Some(metadata) = line.strip_prefix("# ") else {
        let sample = parse_sample(line)?;
        let family = families.last_mut().ok_or("a sample without a family")?;
        if !possible_names(family).contains(&sample.name) {
            return Err(format!("a sample of another family or type within {}", family.name));
        }
        family.samples.push(sample);
        return Ok(());
    };
    let mut parts = metadata.splitn(3, ' ');
    let (keyword, name) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
    let text = parts.next().ok_or("metadata without a text")?;
    if !is_name(name, true) {
        return Err("invalid family name".into());
    }
    if families.last().is_none_or(|family| family.name != name) {
        if families.iter().any(|family| family.name == name) {
            return Err("the family is interleaved with others".into());
        }
        families.push(Family { name: name.into(), ..Family::default() });
    }
    let family = families.last_mut().expect("just pushed");
    if !family.samples.is_empty() {
        return Err("metadata after samples".into());
    }
    let (slot, text) = match keyword {
        "TYPE" => (&mut family.kind, text.to_owned()),
        "UNIT" => (&mut family.unit, text.to_owned()),
        "HELP" => (&mut family.help, unescape(text)?),
        _ => return Err("unknown keyword".into()),
    };
    if !slot.is_empty() {
        return Err("metadata given twice".into());
    }
    *slot = text;
    Ok(())
}

fn possible_names(family: &Family) -> Vec<String> {
    let suffixes: &[&str] = match family.kind.as_str() {
        "counter" => &["_total", "_created"],
        "histogram" => &["_bucket", "_count", "_sum", "_created"],
        "info" => &["_info"],
        _ => &[""],
    };
    suffixes.iter().map(|suffix| format!("{}{suffix}", family.name)).collect()
}

fn check(family: &Family) -> Result<(), String> {
    if !["counter", "gauge", "histogram", "info", "stateset"].contains(&family.kind.as_str()) {
        return Err(format!("type {:?}", family.kind));
    }
    if !family.unit.is_empty() {
        if !family.name.ends_with(&format!("_{}", family.unit)) {
            return Err("the unit is not the end of the name".into());
        }
        if ["info", "stateset"].contains(&family.kind.as_str()) {
            return Err("a unit on a type without one".into());
        }
    }
    let mut seen = BTreeSet::new();
    let mut groups: Vec<Labels> = Vec::new();
    for sample in &family.samples {
        let mut identity = sample.labels.clone();
        identity.sort();
        if !seen.insert((sample.name.clone(), identity.clone())) {
            return Err(format!("duplicate series {} {identity:?}", sample.name));
        }
        identity.retain(|(name, _)| !(family.kind == "histogram" && name == "le"));
        if groups.last() != Some(&identity) {
            if groups.contains(&identity) {
                return Err(format!("the samples of {identity:?} are not together"));
            }
            groups.push(identity);
        }
        check_sample(family, sample)?;
    }
    if family.kind == "histogram" {
        for group in groups {
            check_histogram(family, &group)?;
        }
    }
    Ok(())
}

fn check_sample(family: &Family, sample: &Sample) -> Result<(), String> {
    let is_count =
        family.kind == "counter" || sample.name.ends_with("_bucket") || sample.name.ends_with("_count");
    if is_count && family.kind != "gauge" && (sample.value.is_nan() || sample.value < 0.0) {
        return Err(format!("a count of {}", sample.value));
    }
    if family.kind == "info" && sample.value != 1.0 {
        return Err("an info that is not 1".into());
    }
    if family.kind == "stateset" {
        if sample.value != 0.0 && sample.value != 1.0 {
            return Err("a state that is neither 0 nor 1".into());
        }
        if !sample.labels.iter().any(|(name, _)| *name == family.name) {
            return Err("a state set without the label of its name".into());
        }
    }
    if let Some((labels, ..)) = &sample.exemplar {
        let is_allowed = sample.name.ends_with("_total") || sample.name.ends_with("_bucket");
        let characters: usize =
            labels.iter().map(|(name, value)| name.chars().count() + value.chars().count()).sum();
        if !is_allowed || characters > 128 {
            return Err("an exemplar where none is allowed, or too long".into());
        }
    }
    Ok(())
}

fn check_histogram(family: &Family, group: &Labels) -> Result<(), String> {
    let of_group = |sample: &&Sample| {
        let mut labels: Labels = sample.labels.iter().filter(|(name, _)| name != "le").cloned().collect();
        labels.sort();
        labels == *group
    };
    let (mut bound, mut below, mut count, mut sum) = (f64::NEG_INFINITY, 0.0, None, None);
    for sample in family.samples.iter().filter(of_group) {
        let le = sample.labels.iter().find(|(name, _)| name == "le").map(|(_, value)| value.as_str());
        match sample.name.rsplit('_').next() {
            Some("bucket") => {
                let text = le.ok_or("a bucket without le")?;
                let looks_like_a_float = text == "+Inf" || text.contains(['.', 'e']);
                let upper = number(text)?;
                if !looks_like_a_float || upper <= bound || sample.value < below {
                    return Err(format!("bucket le={text} is not canonical, or not in order"));
                }
                (bound, below) = (upper, sample.value);
            }
            Some("count") => count = Some(sample.value),
            Some("sum") => sum = Some(sample.value),
            _ => {}
        }
    }
    if bound != f64::INFINITY || count != Some(below) || sum.is_none() {
        return Err("no +Inf bucket, or it is not the count, or there is no sum".into());
    }
    Ok(())
}

fn parse_sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("a sample without a value")?;
    let (name, rest) = line.split_at(end);
    if !is_name(name, true) {
        return Err("invalid sample name".into());
    }
    let (labels, rest) = parse_labels(rest)?;
    let rest = rest.strip_prefix(' ').ok_or("no single blank before the value")?;
    let (value, exemplar) = match rest.split_once(" # ") {
        Some((value, exemplar)) => (value, Some(parse_exemplar(exemplar)?)),
        None => (rest, None),
    };
    Ok(Sample { name: name.into(), labels, value: number(value)?, exemplar })
}

fn parse_exemplar(text: &str) -> Result<(Labels, f64, Option<f64>), String> {
    if !text.starts_with('{') {
        return Err("an exemplar without labels".into());
    }
    let (labels, rest) = parse_labels(text)?;
    let mut parts = rest.strip_prefix(' ').ok_or("no blank in the exemplar")?.split(' ');
    let value = number(parts.next().unwrap_or(""))?;
    let at = parts.next().map(number).transpose()?;
    if parts.next().is_some() {
        return Err("text after the exemplar".into());
    }
    Ok((labels, value, at))
}

/// `{a="b",c="d"}` and what follows it. No braces: no labels.
fn parse_labels(text: &str) -> Result<(Labels, &str), String> {
    let Some(mut rest) = text.strip_prefix('{') else {
        return Ok((Vec::new(), text));
    };
    let mut labels: Labels = Vec::new();
    loop {
        let (name, after) = rest.split_once("=\"").ok_or("a label without a value")?;
        if !is_name(name, false) || labels.iter().any(|(other, _)| other == name) {
            return Err(format!("invalid or repeated label {name:?}"));
        }
        let end = closing_quote(after).ok_or("a label value without an end")?;
        labels.push((name.into(), unescape(&after[..end])?));
        rest = &after[end + 1..];
        if let Some(after) = rest.strip_prefix('}') {
            return Ok((labels, after));
        }
        rest = rest.strip_prefix(',').ok_or("neither comma nor brace after a label")?;
    }
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return Some(at),
            _ => {}
        }
    }
    None
}

fn unescape(text: &str) -> Result<String, String> {
    let mut plain = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => plain.push(match characters.next() {
                Some('n') => '\n',
                Some(same @ ('\\' | '"')) => same,
                other => return Err(format!("invalid escape {other:?}")),
            }),
            '"' => return Err("an unescaped quote".into()),
            other => plain.push(other),
        }
    }
    Ok(plain)
}

fn number(text: &str) -> Result<f64, String> {
    let is_word = ["+Inf", "-Inf", "NaN"].contains(&text);
    let is_number = !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.e".contains(&byte))
        && !text.starts_with('.');
    match text.parse::<f64>() {
        Ok(value) if is_word || is_number => Ok(value),
        _ => Err(format!("invalid number {text:?}")),
    }
}

fn is_name(name: &str, may_have_colon: bool) -> bool {
    let is_start = |byte: u8| byte == b'_' || byte.is_ascii_alphabetic() || (may_have_colon && byte == b':');
    let is_rest = |byte: u8| is_start(byte) || byte.is_ascii_digit();
    name.bytes().next().is_some_and(is_start) && name.bytes().all(is_rest)
}
