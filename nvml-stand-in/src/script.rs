//! The script: what the library is to say. README.md is its description for people.

use std::collections::HashMap;

/// Everything that a script says.
#[derive(Debug, Default)]
pub struct Script {
    /// The driver's version; `None`: no driver is loaded.
    pub driver: Option<String>,
    /// What this generation of the library can do.
    pub shape: Shape,
    /// GPUs, by NVML index.
    pub gpus: Vec<Gpu>,
    /// Events, by sequence number.
    pub events: Vec<Event>,
    /// Calls that fail.
    pub errors: Vec<Fault>,
    /// Calls that do not return while they are listed.
    pub hangs: Vec<Fault>,
    /// A file to which every call's name is appended.
    pub trace: Option<String>,
}

/// The behaviour of a generation. Which symbols it exports is a matter of the file, not of the script.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Bytes per entry of the `_v3` process lists.
    pub stride: usize,
    /// Event bits that a GPU supports.
    pub events: u64,
    /// Whether field 230 is known.
    pub recovery_action: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Shape::named("580").unwrap_or(Shape { stride: 24, events: 0, recovery_action: false })
    }
}

impl Shape {
    fn named(name: &str) -> Option<Shape> {
        Some(match name {
            "early-535" => Shape { stride: 32, events: 0x19f, recovery_action: false },
            "535" | "550" => Shape { stride: 24, events: 0x19f, recovery_action: false },
            "580" => Shape { stride: 24, events: 0xff9f, recovery_action: true },
            _ => return None,
        })
    }
}

/// A GPU.
#[derive(Debug)]
pub struct Gpu {
    pub index: u32,
    pub uuid: String,
    pub pci: (u32, u32, u32),
    pub name: String,
    pub mode: u32,
    pub capability: (i32, i32),
    pub recovery: u32,
    /// `None`: the GPU knows no MIG.
    pub mig: Option<bool>,
    pub is_lost: bool,
    pub instances: Vec<Instance>,
    pub mps: Processes,
    pub compute: Processes,
}

/// A MIG device.
#[derive(Debug)]
pub struct Instance {
    pub slot: u32,
    pub uuid: String,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
    pub profile: String,
    pub mode: u32,
}

/// One of a GPU's process lists.
#[derive(Debug, Default)]
pub struct Processes {
    pub list: Vec<Process>,
    /// Entries that appear after each call, and after how many calls that ends.
    pub growth: (u32, u32),
}

/// A process in a list.
#[derive(Debug, Clone)]
pub struct Process {
    pub pid: u32,
    pub memory: u64,
    pub gpu_instance: u32,
    pub compute_instance: u32,
}

/// An event, delivered once to every event set that was registered before it was written.
#[derive(Debug)]
pub struct Event {
    pub sequence: u64,
    pub gpu: u32,
    pub kind: u64,
    pub data: u64,
    pub gpu_instance: u32,
    pub compute_instance: u32,
}

/// A call that fails or hangs, on one GPU or on all.
#[derive(Debug)]
pub struct Fault {
    pub function: String,
    pub gpu: Option<u32>,
    pub code: u32,
}

impl Fault {
    pub fn is_for(&self, function: &str, gpu: Option<u32>) -> bool {
        self.function == function && (self.gpu.is_none() || self.gpu == gpu)
    }
}

impl Script {
    /// Reads a script; the error names the line.
    pub fn parse(text: &str) -> Result<Script, String> {
        let mut script = Script::default();
        for (number, line) in text.lines().enumerate() {
            let words = words(line);
            if !words.is_empty() {
                script.take(&words).map_err(|error| format!("line {}: {error}", number + 1))?;
            }
        }
        script.gpus.sort_by_key(|gpu| gpu.index);
        script.events.sort_by_key(|event| event.sequence);
        Ok(script)
    }

    /// The GPU with this index.
    pub fn gpu(&self, index: u32) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.index == index)
    }

    fn take(&mut self, words: &[String]) -> Result<(), String> {
        let plain: Vec<&str> =
            words[1..].iter().filter(|word| !word.contains('=')).map(String::as_str).collect();
        let mut keys = Keys::of(&words[1..]);
        match words[0].as_str() {
            "driver" => self.driver = plain.first().map(|version| (*version).to_owned()),
            "shape" => {
                let name = plain.first().copied().unwrap_or_default();
                self.shape = Shape::named(name).ok_or_else(|| format!("unknown shape {name:?}"))?;
            }
            "trace" => self.trace = plain.first().map(|path| (*path).to_owned()),
            "gpu" => self.gpus.push(gpu(&mut keys)?),
            "mig" => {
                let index = keys.number("gpu")?;
                let instance = instance(&mut keys)?;
                self.gpu_mut(index)?.instances.push(instance);
            }
            list @ ("mps" | "compute") => {
                let index = keys.number("gpu")?;
                let process = process(&mut keys)?;
                self.list_mut(index, list)?.list.push(process);
            }
            "grow" => {
                let (index, list) = (keys.number("gpu")?, keys.text("list")?);
                let growth = (keys.number("by")?, keys.number("times")?);
                self.list_mut(index, &list)?.growth = growth;
            }
            "event" => self.events.push(event(&mut keys)?),
            "error" => {
                let function = plain.first().ok_or("error needs a function")?;
                let code = plain.get(1).ok_or("error needs a return code")?;
                let code = code.parse().map_err(|_| format!("{code:?} is no return code"))?;
                self.errors.push(fault(function, code, &mut keys)?);
            }
            "hang" => {
                let function = plain.first().ok_or("hang needs a function")?;
                self.hangs.push(fault(function, 0, &mut keys)?);
            }
            other => return Err(format!("unknown statement {other:?}")),
        }
        keys.finish()
    }

    fn gpu_mut(&mut self, index: u32) -> Result<&mut Gpu, String> {
        self.gpus.iter_mut().find(|gpu| gpu.index == index).ok_or_else(|| format!("no gpu {index} above"))
    }

    fn list_mut(&mut self, index: u32, list: &str) -> Result<&mut Processes, String> {
        let gpu = self.gpu_mut(index)?;
        match list {
            "mps" => Ok(&mut gpu.mps),
            "compute" => Ok(&mut gpu.compute),
            other => Err(format!("unknown list {other:?}")),
        }
    }
}

fn gpu(keys: &mut Keys) -> Result<Gpu, String> {
    Ok(Gpu {
        index: keys.number("index")?,
        uuid: keys.text("uuid")?,
        pci: pci(&keys.text("pci")?)?,
        name: keys.text_or("name", "NVIDIA stand-in"),
        mode: mode(&keys.text_or("mode", "default"))?,
        capability: capability(&keys.text_or("cc", "8.0"))?,
        recovery: keys.number_or("recovery", 0)?,
        mig: match keys.text_or("mig", "none").as_str() {
            "none" => None,
            "on" => Some(true),
            "off" => Some(false),
            other => return Err(format!("mig is none, on or off, not {other:?}")),
        },
        is_lost: keys.flag("lost")?,
        instances: Vec::new(),
        mps: Processes::default(),
        compute: Processes::default(),
    })
}

fn instance(keys: &mut Keys) -> Result<Instance, String> {
    Ok(Instance {
        slot: keys.number("slot")?,
        uuid: keys.text("uuid")?,
        gi: keys.number("gi")?,
        ci: keys.number_or("ci", 0)?,
        profile: keys.text_or("profile", "1g.5gb"),
        mode: mode(&keys.text_or("mode", "default"))?,
    })
}

fn process(keys: &mut Keys) -> Result<Process, String> {
    let memory = keys.text_or("memory", "none");
    Ok(Process {
        pid: keys.number("pid")?,
        memory: match memory.as_str() {
            "none" => crate::abi::NO_MEMORY,
            bytes => bytes.parse().map_err(|_| format!("memory is none or bytes, not {bytes:?}"))?,
        },
        gpu_instance: keys.number_or("gi", crate::abi::NO_INSTANCE)?,
        compute_instance: keys.number_or("ci", crate::abi::NO_INSTANCE)?,
    })
}

fn event(keys: &mut Keys) -> Result<Event, String> {
    let xid = keys.number_or("xid", 0)?;
    let kind = keys.text_or("type", if xid == 0 { "" } else { "0x8" });
    Ok(Event {
        sequence: u64::from(keys.number("seq")?),
        gpu: keys.number("gpu")?,
        kind: kind
            .strip_prefix("0x")
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .ok_or("an event needs xid=NUMBER or type=0xBIT")?,
        data: u64::from(xid),
        gpu_instance: keys.number_or("gi", crate::abi::NO_INSTANCE)?,
        compute_instance: keys.number_or("ci", crate::abi::NO_INSTANCE)?,
    })
}

fn fault(function: &str, code: u32, keys: &mut Keys) -> Result<Fault, String> {
    let gpu = if keys.has("gpu") { Some(keys.number("gpu")?) } else { None };
    Ok(Fault { function: function.to_owned(), gpu, code })
}

/// `0000:3b:00.0`, with or without the function.
fn pci(text: &str) -> Result<(u32, u32, u32), String> {
    let bad = || format!("{text:?} is no PCI address like 0000:3b:00.0");
    let mut parts = text.split('.').next().unwrap_or(text).split(':');
    let mut next = || parts.next().and_then(|part| u32::from_str_radix(part, 16).ok()).ok_or_else(bad);
    Ok((next()?, next()?, next()?))
}

fn mode(text: &str) -> Result<u32, String> {
    match text {
        "default" => Ok(0),
        "exclusive_thread" => Ok(1),
        "prohibited" => Ok(2),
        "exclusive_process" => Ok(3),
        number => number.parse().map_err(|_| format!("unknown compute mode {number:?}")),
    }
}

fn capability(text: &str) -> Result<(i32, i32), String> {
    text.split_once('.')
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
        .ok_or_else(|| format!("{text:?} is no compute capability like 8.0"))
}

/// Words of a line: split at spaces outside double quotes; `#` starts a comment.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut is_quoted, mut is_open) = (String::new(), false, false);
    for character in line.chars() {
        match character {
            '"' => (is_quoted, is_open) = (!is_quoted, true),
            '#' if !is_quoted && !is_open => break,
            blank if blank.is_whitespace() && !is_quoted => {
                if is_open {
                    words.push(std::mem::take(&mut word));
                }
                is_open = false;
            }
            other => {
                word.push(other);
                is_open = true;
            }
        }
    }
    if is_open {
        words.push(word);
    }
    words
}

/// The `key=value` words of a statement.
struct Keys(HashMap<String, String>);

impl Keys {
    fn of(words: &[String]) -> Keys {
        let pairs = words.iter().filter_map(|word| word.split_once('='));
        Keys(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
    }

    fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn text(&mut self, key: &str) -> Result<String, String> {
        self.0.remove(key).ok_or_else(|| format!("{key}= is missing"))
    }

    fn text_or(&mut self, key: &str, default: &str) -> String {
        self.0.remove(key).unwrap_or_else(|| default.to_owned())
    }

    fn number(&mut self, key: &str) -> Result<u32, String> {
        let text = self.text(key)?;
        text.parse().map_err(|_| format!("{key}={text} is no number"))
    }

    fn number_or(&mut self, key: &str, default: u32) -> Result<u32, String> {
        if self.has(key) { self.number(key) } else { Ok(default) }
    }

    fn flag(&mut self, key: &str) -> Result<bool, String> {
        match self.text_or(key, "no").as_str() {
            "yes" => Ok(true),
            "no" => Ok(false),
            other => Err(format!("{key} is yes or no, not {other:?}")),
        }
    }

    fn finish(self) -> Result<(), String> {
        self.0.keys().next().map_or(Ok(()), |key| Err(format!("unknown key {key:?}")))
    }
}
