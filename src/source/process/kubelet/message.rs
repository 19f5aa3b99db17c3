//! The messages of `podresources/v1/api.proto`, as far as they are needed: names.
//!
//! Protocol buffers are self-delimiting: a field that is not known is passed over, so that newer kubelets are read too.

use bytes::Bytes;

/// gRPC's frame of an empty message: no compression, length 0.
pub const EMPTY_FRAME: [u8; 5] = [0; 5];

/// A pod in the kubelet's list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedPod {
    /// Namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Its containers' names.
    pub containers: Vec<String>,
}

/// The message in a gRPC frame.
pub fn unframe(body: &Bytes) -> Result<Bytes, &'static str> {
    let [compressed, length @ ..] = *body.first_chunk::<5>().ok_or("there is no message in it")?;
    if compressed != 0 {
        return Err("it is compressed, which was not asked for");
    }
    let length = u32::from_be_bytes(length) as usize;
    if body.len() - 5 != length {
        return Err("its length is not the one announced");
    }
    Ok(body.slice(5..))
}

/// The pods in a `ListPodResourcesResponse`.
pub fn pods(message: &[u8]) -> Result<Vec<ListedPod>, &'static str> {
    let mut pods = Vec::new();
    each(message, |number, content| {
        if number == 1 {
            pods.push(pod(content)?);
        }
        Ok(())
    })?;
    Ok(pods)
}

fn pod(message: &[u8]) -> Result<ListedPod, &'static str> {
    let mut pod = ListedPod::default();
    each(message, |number, content| {
        match number {
            1 => pod.name = text(content)?,
            2 => pod.namespace = text(content)?,
            3 => each(content, |number, content| {
                if number == 1 {
                    pod.containers.push(text(content)?);
                }
                Ok(())
            })?,
            _ => {}
        }
        Ok(())
    })?;
    Ok(pod)
}

fn text(content: &[u8]) -> Result<String, &'static str> {
    String::from_utf8(content.to_vec()).map_err(|_| "a name is not UTF-8")
}

/// Calls `take` with number and content of every length-delimited field.
fn each<'a>(
    mut left: &'a [u8],
    mut take: impl FnMut(u64, &'a [u8]) -> Result<(), &'static str>,
) -> Result<(), &'static str> {
    const CUT: &str = "a field is cut off";

    while !left.is_empty() {
        let tag = varint(&mut left)?;
        let skip = match tag & 7 {
            0 => {
                varint(&mut left)?;
                continue;
            }
            1 => 8,
            5 => 4,
            2 => {
                let length = usize::try_from(varint(&mut left)?).map_err(|_| CUT)?;
                let (content, rest) = left.split_at_checked(length).ok_or(CUT)?;
                take(tag >> 3, content)?;
                left = rest;
                continue;
            }
            _ => return Err("a field has an unknown type"),
        };
        left = left.get(skip..).ok_or(CUT)?;
    }
    Ok(())
}

fn varint(left: &mut &[u8]) -> Result<u64, &'static str> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = left.split_first().ok_or("a number is cut off")?;
        *left = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number is too long")
}

#[cfg(test)]
pub mod testing {
    use super::ListedPod;

    fn field(number: u8, content: &[u8], into: &mut Vec<u8>) {
        into.push(number << 3 | 2);
        let mut length = content.len();
        while length >= 0x80 {
            into.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
            length >>= 7;
        }
        into.push(u8::try_from(length).unwrap());
        into.extend_from_slice(content);
    }

    /// The answer with these pods, with devices, numbers and memory as a kubelet adds them.
    pub fn encode(pods: &[ListedPod]) -> Vec<u8> {
        let mut answer = Vec::new();
        for pod in pods {
            let mut message = Vec::new();
            field(1, pod.name.as_bytes(), &mut message);
            field(2, pod.namespace.as_bytes(), &mut message);
            for name in &pod.containers {
                let mut container = Vec::new();
                field(1, name.as_bytes(), &mut container);
                let mut device = Vec::new();
                field(1, b"nvidia.com/gpu.shared", &mut device);
                field(2, b"GPU-0::7", &mut device);
                field(2, &device, &mut container);
                field(3, &[1, 2, 0x83, 1], &mut container);
                container.extend([0x20, 0xff, 1, 0x29, 0, 0, 0, 0, 0, 0, 0, 0]);
                field(3, &container, &mut message);
            }
            field(1, &message, &mut answer);
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_a_kubelet_writes_is_read(
            pods in proptest::collection::vec(
                ("[a-z0-9.-]{1,200}", "[a-z-]{1,20}", proptest::collection::vec("[a-z]{1,9}", 0..4)), 0..5)
        ) {
            let pods: Vec<ListedPod> = pods
                .into_iter()
                .map(|(name, namespace, containers)| ListedPod { namespace, name, containers })
                .collect();
            prop_assert_eq!(super::pods(&testing::encode(&pods)), Ok(pods));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = pods(&bytes);
            let _ = unframe(&bytes.into());
        }
    }

    #[test]
    fn frames_are_checked() {
        assert_eq!(unframe(&Bytes::from_static(&[0, 0, 0, 0, 1, 9])), Ok(Bytes::from_static(&[9])));
        assert!(unframe(&Bytes::from_static(&[0, 0, 0, 0, 2, 9])).is_err());
        assert!(unframe(&Bytes::from_static(&[1, 0, 0, 0, 1, 9])).is_err());
        assert!(unframe(&Bytes::new()).is_err());
    }
}
