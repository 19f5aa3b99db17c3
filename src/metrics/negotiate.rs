//! Which text format and which encoding a scraper gets, by its `Accept` and `Accept-Encoding`.

/// A text format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// Prometheus text 0.0.4: for everybody who does not name the other.
    Text,
    /// OpenMetrics 1.0: what a default Prometheus prefers.
    OpenMetrics,
}

impl Format {
    /// Both.
    pub const ALL: [Format; 2] = [Format::Text, Format::OpenMetrics];

    /// The whole `Content-Type`. Prometheus 3 refuses a scrape without one.
    pub fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A content encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// As it is.
    Identity,
    /// gzip.
    Gzip,
}

/// The format for this `Accept` header (several header lines joined by commas).
///
/// OpenMetrics only goes to those who name it, at a quality above that of plain text. A parameter that is neither
/// `version` nor `q` (`escaping`, `charset`) does not matter.
pub fn format(accept: Option<&str>) -> Format {
    let Some(accept) = accept else {
        return Format::Text;
    };
    let (mut open_metrics, mut text, mut text_range, mut anything) = (None, None, None, None);
    for range in accept.split(',').filter_map(Range::parse) {
        let slot = match (range.name, range.version) {
            (name, None | Some("1.0.0")) if name.eq_ignore_ascii_case("application/openmetrics-text") => {
                &mut open_metrics
            }
            (name, None | Some("0.0.4")) if name.eq_ignore_ascii_case("text/plain") => &mut text,
            (name, _) if name.eq_ignore_ascii_case("text/*") => &mut text_range,
            ("*/*", _) => &mut anything,
            _ => continue,
        };
        *slot = (*slot).max(Some(range.quality));
    }
    let is_text_named = text.is_some();
    let text = text.or(text_range).or(anything).unwrap_or(0);
    match open_metrics {
        Some(quality) if quality > text || (quality == text && quality > 0 && !is_text_named) => {
            Format::OpenMetrics
        }
        _ => Format::Text,
    }
}

/// The encoding for this `Accept-Encoding` header (several header lines joined by commas).
pub fn encoding(accept: Option<&str>) -> Encoding {
    let (mut gzip, mut identity, mut anything) = (None, None, None);
    for range in accept.unwrap_or_default().split(',').filter_map(Range::parse) {
        let slot = match range.name {
            name if name.eq_ignore_ascii_case("gzip") || name.eq_ignore_ascii_case("x-gzip") => &mut gzip,
            name if name.eq_ignore_ascii_case("identity") => &mut identity,
            "*" => &mut anything,
            _ => continue,
        };
        *slot = (*slot).max(Some(range.quality));
    }
    let gzip = gzip.or(anything).unwrap_or(0);
    if gzip > 0 && gzip >= identity.unwrap_or(0) { Encoding::Gzip } else { Encoding::Identity }
}

/// One element of an `Accept` or `Accept-Encoding` header.
struct Range<'a> {
    name: &'a str,
    version: Option<&'a str>,
    /// Thousandths.
    quality: u16,
}

impl Range<'_> {
    /// `None` for an element that is no element: it is ignored.
    fn parse(element: &str) -> Option<Range<'_>> {
        let mut parts = element.split(';').map(str::trim);
        let name = parts.next().filter(|name| !name.is_empty())?;
        let mut range = Range { name, version: None, quality: 1000 };
        for parameter in parts {
            let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let (key, value) = (key.trim(), value.trim().trim_matches('"'));
            if key.eq_ignore_ascii_case("q") {
                range.quality = quality(value)?;
            } else if key.eq_ignore_ascii_case("version") {
                range.version = Some(value);
            }
        }
        Some(range)
    }
}

/// A quality of RFC 9110 (`0`, `1`, up to three decimals) in thousandths.
fn quality(text: &str) -> Option<u16> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let thousandths = format!("{fraction:0<3}").parse::<u16>().ok()?;
    match whole {
        "0" => Some(thousandths),
        "1" if thousandths == 0 => Some(1000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_header_gets_an_answer(text in any::<String>(), near in "[a-z/*;=,.q0-9 \"]{0,80}") {
            for header in [text, near] {
                let is_named = header.to_ascii_lowercase().contains("application/openmetrics-text");
                prop_assert!(is_named || format(Some(&header)) == Format::Text);
                let is_taken = header.contains('*') || header.to_ascii_lowercase().contains("gzip");
                prop_assert!(is_taken || encoding(Some(&header)) == Encoding::Identity);
            }
        }
    }

    #[test]
    fn scrapers_get_the_format_that_they_prefer() {
        let prometheus_2_42 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;\
            version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus_2_42_native = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;\
            encoding=delimited,application/openmetrics-text;version=1.0.0;q=0.8,\
            application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
            application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,\
            text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        let cases = [
            (prometheus_2_42, Format::OpenMetrics),
            (prometheus_2_42_native, Format::OpenMetrics),
            (prometheus_3, Format::OpenMetrics),
            (browser, Format::Text),
            ("*/*", Format::Text),
            ("", Format::Text),
            ("text/plain", Format::Text),
            ("application/json", Format::Text),
            ("application/openmetrics-text", Format::OpenMetrics),
            ("Application/OpenMetrics-Text; Version=\"1.0.0\"", Format::OpenMetrics),
            ("application/openmetrics-text;version=1.0.0;q=0", Format::Text),
            ("application/openmetrics-text;version=2.0.0", Format::Text),
            ("application/openmetrics-text;q=0.3,text/plain;q=0.7", Format::Text),
            ("application/openmetrics-text;q=0.7,text/*;q=0.3", Format::OpenMetrics),
            ("application/openmetrics-text,text/plain", Format::Text),
            ("application/openmetrics-text,*/*", Format::OpenMetrics),
            ("application/openmetrics-text;q=2", Format::Text),
            ("application/openmetrics-text;q=nan", Format::Text),
            (";;,,=;q=", Format::Text),
        ];
        for (accept, expected) in cases {
            assert_eq!(format(Some(accept)), expected, "{accept}");
        }
        assert_eq!(format(None), Format::Text);
    }

    #[test]
    fn gzip_goes_to_those_who_take_it() {
        let cases = [
            ("gzip", Encoding::Gzip),
            ("GZIP;q=0.5", Encoding::Gzip),
            ("x-gzip", Encoding::Gzip),
            ("deflate, gzip;q=1.0, *;q=0.5", Encoding::Gzip),
            ("*", Encoding::Gzip),
            ("gzip;q=0", Encoding::Identity),
            ("gzip;q=0.000", Encoding::Identity),
            ("gzip;q=0, *", Encoding::Identity),
            ("identity, gzip;q=0.5", Encoding::Identity),
            ("identity;q=0.5, gzip", Encoding::Gzip),
            ("br, zstd", Encoding::Identity),
            ("", Encoding::Identity),
            ("gzipped", Encoding::Identity),
        ];
        for (accept, expected) in cases {
            assert_eq!(encoding(Some(accept)), expected, "{accept}");
        }
        assert_eq!(encoding(None), Encoding::Identity);
    }
}
