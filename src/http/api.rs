//! `/api/v1`: the model as JSON.

use std::collections::BTreeMap;

use hyper::{Response, StatusCode};
use jiff::Timestamp;
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error as ValueError, StrDeserializer};
use serde::{Deserialize, Serialize};

use crate::engine::incident::{Cause, Incident, IncidentState};
use crate::engine::snapshot::{ClientView, DomainView, Snapshot};
use crate::http::body::{Body, json};

/// Incidents on one answer unless `limit` says otherwise, and at most.
const DEFAULT_LIMIT: usize = 100;
const MAX_LIMIT: usize = 1000;

#[derive(Serialize)]
struct FaultDomains<'a> {
    at: Timestamp,
    generation: u64,
    #[serde(rename = "fault_domains")]
    domains: Vec<FaultDomain<'a>>,
}

#[derive(Serialize)]
struct FaultDomain<'a> {
    #[serde(flatten)]
    domain: &'a DomainView,
    /// The clients with contexts on the device, beside their number `clients`.
    processes: Vec<&'a ClientView>,
}

/// `/api/v1/fault-domains`: each domain with its clients.
pub(super) fn fault_domains(snapshot: &Snapshot) -> Response<Body> {
    let mut processes: BTreeMap<&str, Vec<&ClientView>> = BTreeMap::new();
    for client in &snapshot.clients {
        for domain in &client.domains {
            processes.entry(domain).or_default().push(client);
        }
    }
    let domains = snapshot
        .domains
        .iter()
        .map(|domain| FaultDomain {
            domain,
            processes: processes.remove(&*domain.labels.fault_domain).unwrap_or_default(),
        })
        .collect();
    json(StatusCode::OK, &FaultDomains { at: snapshot.at, generation: snapshot.generation, domains })
}

/// `/api/v1/status`: the whole snapshot.
pub(super) fn status(snapshot: &Snapshot) -> Response<Body> {
    json(StatusCode::OK, snapshot)
}

#[derive(Serialize)]
struct Incidents<'a> {
    incidents: Vec<&'a Incident>,
}

#[derive(Serialize)]
struct Refused {
    error: String,
}

/// `/api/v1/incidents`: the incidents that the query asks for, newest first.
pub(super) fn incidents(snapshot: &Snapshot, query: Option<&str>) -> Response<Body> {
    match Filter::parse(query.unwrap_or_default()) {
        Ok(filter) => {
            let chosen = snapshot.incidents.iter().map(|incident| &**incident).filter(|it| filter.takes(it));
            json(StatusCode::OK, &Incidents { incidents: chosen.take(filter.limit).collect() })
        }
        Err(error) => json(StatusCode::BAD_REQUEST, &Refused { error }),
    }
}

/// Which incidents.
#[derive(Debug, PartialEq)]
struct Filter {
    limit: usize,
    before: Option<String>,
    state: Option<IncidentState>,
    cause: Option<Cause>,
    fault_domain: Option<String>,
}

impl Filter {
    fn parse(query: &str) -> Result<Filter, String> {
        let mut filter =
            Filter { limit: DEFAULT_LIMIT, before: None, state: None, cause: None, fault_domain: None };
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let value = decode(value).ok_or_else(|| format!("`{key}` is not valid percent-encoded UTF-8"))?;
            match key {
                "limit" => {
                    filter.limit =
                        value.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit)).ok_or_else(
                            || format!("`limit` must be a number from 1 to {MAX_LIMIT}, not `{value}`"),
                        )?;
                }
                "before" => {
                    let is_id =
                        |part: &str| part.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
                    if value.is_empty() || !is_id(&value) {
                        return Err(format!("`before` must be the id of an incident, not `{value}`"));
                    }
                    filter.before = Some(value);
                }
                "state" => filter.state = Some(word(key, &value)?),
                "cause" => filter.cause = Some(word(key, &value)?),
                "fault_domain" => filter.fault_domain = Some(value),
                _ => {
                    return Err(format!(
                        "unknown parameter `{key}`; known are limit, before, state, cause, fault_domain"
                    ));
                }
            }
        }
        Ok(filter)
    }

    fn takes(&self, incident: &Incident) -> bool {
        // Ids sort by time.
        self.before.as_ref().is_none_or(|before| *incident.id < **before)
            && self.state.is_none_or(|state| incident.state == state)
            && self.cause.is_none_or(|cause| incident.cause == cause)
            && self
                .fault_domain
                .as_ref()
                .is_none_or(|wanted| incident.fault_domains.iter().any(|domain| **domain == **wanted))
    }
}

/// The value with this word, as JSON spells it.
fn word<'de, T: Deserialize<'de>>(key: &str, value: &'de str) -> Result<T, String> {
    let deserializer: StrDeserializer<'_, ValueError> = value.into_deserializer();
    T::deserialize(deserializer).map_err(|error| format!("`{key}`: {error}"))
}

/// Percent-encoding undone; `None` where it is broken.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [rest.next()?, rest.next()?];
                if !digits.iter().all(u8::is_ascii_hexdigit) {
                    return None;
                }
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            b'+' => b' ',
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use serde_json::Value;

    use super::*;
    use crate::test_nodes as nodes;

    async fn body(response: Response<Body>) -> (StatusCode, Value) {
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    async fn ids(query: &str) -> Vec<String> {
        let (_, value) = body(incidents(&nodes::extreme(), Some(query))).await;
        let found = value["incidents"].as_array().unwrap_or_else(|| panic!("{value}"));
        found.iter().map(|incident| incident["id"].as_str().unwrap().to_owned()).collect()
    }

    #[tokio::test]
    async fn incidents_are_filtered_and_paged() {
        assert_eq!(ids("").await.len(), 6);
        assert_eq!(ids("cause=gpu").await, ["0195f0000000-gpu"]);
        assert_eq!(ids("fault_domain=default%2F0").await, ["0195f0000001-1"]);
        assert_eq!(ids("state=open").await.len(), 0);
        assert_eq!(ids("limit=1").await, ["0195f0000001-1"]);
        assert_eq!(ids("before=0195f0000001-1&limit=2").await.len(), 2);
    }

    #[tokio::test]
    async fn a_query_that_is_not_understood_is_refused() {
        for query in ["limit=0", "limit=x", "state=opened", "cause=", "color=red", "before=%f", "before=%ff"]
        {
            let (status, value) = body(incidents(&nodes::empty(), Some(query))).await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{query}");
            assert!(value["error"].as_str().unwrap().contains('`'), "{value}");
        }
    }

    #[tokio::test]
    async fn an_incident_has_the_promised_shape() {
        let (_, value) = body(incidents(&nodes::node(1, 1), None)).await;
        let incident = &value["incidents"][0];
        assert_eq!(incident["started_at"], "2026-04-01T11:50:00Z");
        assert_eq!(incident["state"], "closed");
        assert_eq!(incident["devices"][0]["UUID"], *nodes::uuid(0));
        assert_eq!(incident["culprit"]["evidence"], "server_log");
        assert_eq!(incident["xids"][0]["source"], "kmsg");
        assert_eq!(incident["recovery"]["blocked_by"], Value::Array(Vec::new()));
    }

    #[tokio::test]
    async fn domains_carry_their_clients() {
        let (_, value) = body(fault_domains(&nodes::node(2, 3))).await;
        let domain = &value["fault_domains"][1];
        assert_eq!(domain["fault_domain"], "default/1");
        assert_eq!(domain["GPU_I_ID"], "");
        assert_eq!(domain["clients"], 3);
        assert_eq!(domain["processes"].as_array().unwrap().len(), 3);
        assert_eq!(domain["radius"]["application"]["clients"], 3);
        assert_eq!(domain["radius"]["application"]["work_at_risk_seconds"], 10800.0);
        assert_eq!(domain["lost"]["fault"]["total"], 0);
    }

    #[tokio::test]
    async fn even_an_extreme_snapshot_is_valid_json() {
        let (status, value) = body(super::status(&nodes::extreme())).await;
        assert_eq!(status, StatusCode::OK);
        assert_eq!(value["generation"], u64::MAX);
    }
}
