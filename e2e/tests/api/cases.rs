//! Objects that the API server accepts, and objects that it rejects. Each rejection has exactly one cause: a field and
//! the end of the server's message.

use serde_json::{Value, json};

use super::Cause;

/// A spec or a status, and the cause if the API server rejects the object.
type Case = (Value, Option<Cause>);
/// The name and the spec of an object, and the cause if the API server rejects the object.
type NamedCase = (String, Value, Option<Cause>);

const NOT_CIDR: &str = "is not a CIDR: write an address, / and a prefix length";
const NOT_CIDR4: &str = "is not an IPv4 CIDR: write an address, / and a prefix length, such as 10.244.0.0/16 (IPv6 goes under ipv6)";
const NOT_CIDR6: &str = "is not an IPv6 CIDR: write an address, / and a prefix length, such as fd00:10:244::/48 (IPv4 goes under ipv4)";
const TOO_WIDE: &str = "is wider than a /8: give narrower ranges";
const NOT_UNICAST: &str = "is not unicast space that pods can use (it is unspecified, loopback, link-local or multicast): choose another range";
const NO_FIT: &str = "a block of this size does not fit into one of the cidrs: give a blockSize that is not less than the prefix length of any of them";
const NOT_RESERVABLE: &str = "is not a CIDR, an address or a range: write 10.244.0.0/24, 10.244.1.1 or 10.244.2.1-10.244.2.9";
const OUTSIDE_10_1_0_1: &str = r#"["10.1.0.1"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#;
const NO_KEY: &str = "a key of matchLabels is no label: it is a name of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, and may have a domain before it, such as example.com/zone";
const NO_VALUE: &str = "a value of matchLabels can be no label's: it is of at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends, or empty";
const NEEDS_VALUES: &str =
    "In and NotIn compare with values: give at least one, or use Exists or DoesNotExist";
const NO_VALUES: &str = "Exists and DoesNotExist take no values: remove them, or use In or NotIn";
const BAD_NAME: &str =
    "the name of a pool has at most 63 characters and no dot: choose a shorter or plainer name";
const NEGATIVE: &str = "should be greater than or equal to 0";
const REQUIRED: &str = "Required value";

fn accepted<const N: usize>(objects: [Value; N]) -> Vec<Case> {
    objects.map(|it| (it, None)).into()
}

fn rejected<const N: usize>(
    field: &'static str,
    message: &'static str,
    objects: [Value; N],
) -> Vec<Case> {
    objects.map(|it| (it, Some((field, message)))).into()
}

/// Returns `object` after `fields` have replaced its fields of the same names.
fn replaced(mut object: Value, fields: Value) -> Value {
    if let (Value::Object(object), Value::Object(fields)) = (&mut object, fields) {
        object.extend(fields);
    }
    object
}

/// Returns the spec of a pool of podCIDRs. `fields` replace the defaults.
fn with(fields: Value) -> Value {
    let spec = json!({"allocationMode": "NodeCIDR", "ipv4": {"cidrs": ["10.0.0.0/16"]}});
    replaced(spec, fields)
}

/// Returns the spec of a pool of blocks. `fields` replace the defaults.
fn blocks(fields: Value) -> Value {
    replaced(with(json!({"allocationMode": "Blocks"})), fields)
}

/// Returns the spec of a pool of blocks. The field `key` of this spec has the value `value`.
fn one(key: &str, value: Value) -> Value {
    blocks(Value::from_iter([(key, value)]))
}

fn v4(cidrs: &[&str], block_size: u32) -> Value {
    with(json!({"ipv4": {"cidrs": cidrs, "blockSize": block_size}}))
}

fn v6(cidrs: &[&str], block_size: u32) -> Value {
    json!({"allocationMode": "NodeCIDR", "ipv6": {"cidrs": cidrs, "blockSize": block_size}})
}

/// Returns the spec of a pool with 10.0.0.0/16, fd00::/48 and these entries in `reserved`.
fn reserved(entries: &[&str]) -> Value {
    with(json!({"ipv6": {"cidrs": ["fd00::/48"]}, "reserved": entries}))
}

/// Returns the spec of a pool whose node selector has one expression with the operator and the values.
fn operator(operator: &str, values: Value) -> Value {
    let zone = [
        ("key", json!("zone")),
        ("operator", json!(operator)),
        ("values", values),
    ];
    expression(Value::from_iter(zone))
}

fn expression(expression: Value) -> Value {
    with(json!({"nodeSelector": {"matchExpressions": vec![expression]}}))
}

pub fn pools() -> Vec<NamedCase> {
    let named = |(spec, cause): Case| ("p".to_owned(), spec, cause);
    let all = [
        families(),
        ranges(),
        block_sizes(),
        reservations(),
        assignments(),
        selectors(),
        numbers(),
        block_terms(),
        address_terms(),
        routes_and_dns(),
    ];
    let mut cases: Vec<NamedCase> = all.into_iter().flatten().map(named).collect();
    for (name, cause) in [
        ("a".repeat(63), None),
        ("a".repeat(64), Some(("<nil>", BAD_NAME))),
        ("a.b".to_owned(), Some(("<nil>", BAD_NAME))),
    ] {
        cases.push((name, with(json!({})), cause));
    }
    cases
}

fn families() -> Vec<Case> {
    let some = "a pool needs addresses: give ipv4, ipv6, or both for dual stack";
    let neither = json!({"allocationMode": "NodeCIDR"});
    let null = json!({"allocationMode": "NodeCIDR", "ipv4": null});
    let modes = r#"supported values: "Blocks", "NodeCIDR""#;
    [
        accepted([
            v4(&["10.0.0.0/16"], 24),
            v6(&["fd00::/48"], 64),
            with(json!({"ipv6": {"cidrs": ["fd00::/48"]}})),
            json!({"ipv4": {"cidrs": ["10.0.0.0/16"]}}),
            blocks(json!({})),
        ]),
        rejected("spec", some, [neither, null]),
        rejected(
            "spec.allocationMode",
            modes,
            [one("allocationMode", json!("Addresses"))],
        ),
        rejected(
            "spec.ipv4.cidrs",
            "should have at least 1 items",
            [v4(&[], 24)],
        ),
    ]
    .concat()
}

fn ranges() -> Vec<Case> {
    const FIRST4: &str = "spec.ipv4.cidrs[0]";
    const FIRST6: &str = "spec.ipv6.cidrs[0]";
    let four = |cidr: &str| v4(&[cidr], 24);
    let six = |cidr: &str| v6(&[cidr], 64);
    let not_ipv4 = [
        "10.0.0.0",
        "10.0.0.00/24",
        "10.0.0.0/024",
        " 10.0.0.0/24",
        "",
        "fd00::/16",
    ];
    let not_canonical = "is not in canonical form: write fd00::/48";
    let wide_enough = ["11.0.0.0/8", "240.0.0.0/8", "100.64.0.0/10"];
    [
        rejected(FIRST4, NOT_CIDR4, not_ipv4.map(four)),
        rejected(FIRST4, NOT_CIDR4, [v4(&["10.0.0.0/33"], 32)]),
        rejected(FIRST6, NOT_CIDR6, ["fd00::", "fe80::%eth0/64"].map(six)),
        rejected(FIRST6, NOT_CIDR6, [v6(&["::ffff:10.0.0.0/112"], 120)]),
        rejected(
            "spec.ipv6.cidrs[1]",
            NOT_CIDR6,
            [v6(&["fd00::/48", "10.0.0.0/16"], 64)],
        ),
        rejected(
            FIRST4,
            "is not in canonical form: write 10.0.0.0/24",
            [four("10.0.0.1/24")],
        ),
        rejected(
            FIRST6,
            not_canonical,
            ["FD00::/48", "fd00:0:0::/48", "fd00::1/48"].map(six),
        ),
        accepted(wide_enough.map(four)),
        accepted([six("fd00::/8")]),
        rejected(FIRST4, TOO_WIDE, ["10.0.0.0/7", "0.0.0.0/0"].map(four)),
        rejected(FIRST6, TOO_WIDE, [six("fc00::/7")]),
        rejected(
            FIRST4,
            NOT_UNICAST,
            ["127.0.0.0/8", "169.254.0.0/16", "224.1.0.0/16"].map(four),
        ),
        rejected(FIRST6, NOT_UNICAST, ["fe80::/64", "ff02::/16"].map(six)),
        // CIDRs of one list, which must not overlap
        accepted([v4(&["10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/23"], 24)]),
        rejected(
            "spec.ipv4.cidrs",
            r#"["10.0.0.0/16"]: other ranges of the list are the same or lie inside: keep only the wider ones"#,
            [v4(&["10.0.0.0/24", "10.0.1.0/24", "10.0.0.0/16"], 24)],
        ),
        rejected(
            "spec.ipv6.cidrs",
            r#"["fd00::/48", "fd00::/48"]: other ranges of the list are the same or lie inside: keep only the wider ones"#,
            [v6(&["fd00::/48", "fd01::/48", "fd00::/48"], 64)],
        ),
    ]
    .concat()
}

fn block_sizes() -> Vec<Case> {
    const SIZE4: &str = "spec.ipv4.blockSize";
    const SIZE6: &str = "spec.ipv6.blockSize";
    [
        accepted([
            v4(&["10.0.0.0/24"], 24),
            v4(&["10.0.0.1/32"], 32),
            v6(&["fd00::/64"], 64),
            v6(&["fd00::1/128"], 128),
            // A pool without `blockSize` has ranges of a default size, for which its CIDRs must be large enough
            with(json!({"ipv4": {"cidrs": ["10.0.0.0/24"]}})),
            blocks(json!({"ipv4": {"cidrs": ["10.0.0.0/26"]}})),
            blocks(json!({"ipv6": {"cidrs": ["fd00::/122"]}})),
        ]),
        rejected(
            SIZE4,
            NO_FIT,
            [
                v4(&["10.0.0.0/16", "10.1.0.0/25"], 24),
                with(json!({"ipv4": {"cidrs": ["10.0.0.0/25"]}})),
                blocks(json!({"ipv4": {"cidrs": ["10.0.0.0/27"]}})),
            ],
        ),
        rejected(
            SIZE6,
            NO_FIT,
            [
                v6(&["fd00::/65"], 64),
                blocks(json!({"ipv6": {"cidrs": ["fd00::/123"]}})),
            ],
        ),
        rejected(
            SIZE4,
            "should be less than or equal to 32",
            [v4(&["10.0.0.0/16"], 33)],
        ),
        rejected(
            SIZE6,
            "should be less than or equal to 128",
            [v6(&["fd00::/64"], 129)],
        ),
    ]
    .concat()
}

fn reservations() -> Vec<Case> {
    const FIRST: &str = "spec.reserved[0]";
    let first = |message, entry: &str| rejected(FIRST, message, [reserved(&[entry])]);
    let outside =
        |message, entries: &[&str]| rejected("spec.reserved", message, [reserved(entries)]);
    let across = "is a range from one family to the other: give both ends of the same family";
    let cannot_be_parsed = [
        "gateway",
        "",
        "-",
        "10.0.0.1-",
        "-10.0.0.1",
        "10.0.0.1 - 10.0.0.2",
        "10.0.0.1-9",
        "10.0.0.1-10.0.0.2-10.0.0.3",
        "10.0.0.0/24-10.0.1.0/24",
    ];
    [
        accepted([
            reserved(&["10.0.0.0/24", "fd00::/64", "10.0.1.1", "fd00::1"]),
            reserved(&["10.0.2.1-10.0.2.9", "fd00::1:1-fd00::1:ffff"]),
            reserved(&["10.0.0.1-10.0.0.1", "fd00::1-fd00::1"]),
            reserved(&["0.0.0.0-255.255.255.255", "::-ffff::"]),
            reserved(&["10.0.0.255-10.0.1.0", "fd00::ffff-fd00::1:0"]),
            reserved(&["127.255.255.255-128.0.0.0", "7fff::-8000::"]),
            reserved(&["9.9.9.9-10.0.0.1", "fd00::9-fd00::a"]),
        ]),
        rejected(
            FIRST,
            NOT_RESERVABLE,
            cannot_be_parsed.map(|it| reserved(&[it])),
        ),
        first("is not in canonical form: write 10.0.0.0/24", "10.0.0.1/24"),
        first("is not in canonical form: write fd00::1", "FD00::1"),
        first(
            "is not in canonical form: write fd00::1-fd00::2",
            "fd00::1-fd00:0::2",
        ),
        // Invalid ranges: those that span two families, those that end before they begin, and duplicates
        first(across, "10.0.0.1-fd00::1"),
        first(across, "::1-10.0.0.1"),
        first(
            "is a range that ends before it begins: write 10.0.0.1-10.0.0.9",
            "10.0.0.9-10.0.0.1",
        ),
        first(
            "is a range that ends before it begins: write 10.0.0.255-10.0.1.0",
            "10.0.1.0-10.0.0.255",
        ),
        first(
            "is a range that ends before it begins: write 127.255.255.255-128.0.0.0",
            "128.0.0.0-127.255.255.255",
        ),
        first(
            "is a range that ends before it begins: write fd00::9-fd00::a",
            "fd00::a-fd00::9",
        ),
        first(
            "is a range that ends before it begins: write 7fff::ffff-8000::",
            "8000::-7fff::ffff",
        ),
        rejected(
            "spec.reserved[2]",
            r#"Duplicate value: "10.0.0.1""#,
            [reserved(&["10.0.0.1", "10.0.0.2", "10.0.0.1"])],
        ),
        // Each reserved entry must overlap a CIDR of the pool
        accepted([
            reserved(&["10.0.0.0/8", "fd00::/32"]),
            reserved(&["10.0.255.250-10.1.0.5"]),
            reserved(&["9.0.0.0-11.0.0.0", "9.0.0.0-9.5.0.0"]),
        ]),
        outside(OUTSIDE_10_1_0_1, &["10.0.0.1", "10.1.0.1"]),
        outside(
            r#"["10.1.0.0/24", "10.2.0.1-10.2.0.9"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#,
            &["10.1.0.0/24", "10.0.0.1", "10.2.0.1-10.2.0.9"],
        ),
        outside(
            r#"["fd00:1::1", "fd01::/64", "fd02::1-fd02::2"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#,
            &["fd00:1::1", "fd00::1", "fd01::/64", "fd02::1-fd02::2"],
        ),
        rejected(
            "spec.reserved",
            r#"["fd00::1"]: in none of the cidrs, so there is nothing to keep out: take it off the list, or correct it"#,
            [with(json!({"reserved": ["fd00::1"]}))],
        ),
    ]
    .concat()
}

fn assignments() -> Vec<Case> {
    let assigned = |entries: Value| with(json!({"assignments": entries}));
    let to = |node: &str, cidrs: &[&str]| assigned(json!([{"node": node, "cidrs": cidrs}]));
    let sizing = |sizing: &str| json!({"cidrs": ["10.0.0.0/16"], "blockSizing": sizing});
    let twice = json!({"node": "a", "cidrs": ["10.0.0.0/24"]});
    [
        accepted([
            to("a", &["10.0.0.0/24"]),
            to("worker-1.example.com", &["10.0.0.0/24", "fd00::/64"]),
            to("a", &["10.1.0.0/24"]),
            blocks(json!({"assignments": []})),
            with(json!({"ipv4": sizing("FitMaxPods")})),
            blocks(json!({"ipv4": sizing("Fixed")})),
        ]),
        rejected(
            "spec.assignments",
            "assignments are for allocationMode NodeCIDR: leave them out, or give the ranges in a pool of that mode",
            [blocks(json!({"assignments": [twice]}))],
        ),
        rejected(
            "spec.ipv4.blockSizing",
            "FitMaxPods is for allocationMode NodeCIDR: leave it out, as with Blocks a node gets as many blocks as its pods need",
            [blocks(json!({"ipv4": sizing("FitMaxPods")}))],
        ),
        rejected(
            "spec.ipv4.blockSizing",
            r#"supported values: "Fixed", "FitMaxPods""#,
            [with(json!({"ipv4": sizing("Fit")}))],
        ),
        rejected(
            "spec.assignments[0].cidrs",
            "two CIDRs of one family: give one CIDR of each family of the pool",
            [to("a", &["10.0.0.0/24", "10.0.1.0/24"])],
        ),
        rejected("spec.assignments[0].cidrs[0]", NOT_CIDR, [to("a", &["10.0.0.1"])]),
        rejected(
            "spec.assignments[0].cidrs[0]",
            "is not in canonical form: write 10.0.0.0/24",
            [to("a", &["10.0.0.1/24"])],
        ),
        rejected(
            "spec.assignments[0].cidrs",
            "should have at least 1 items",
            [to("a", &[])],
        ),
        rejected(
            "spec.assignments[1]",
            r#"Duplicate value: {"node":"a"}"#,
            [assigned(json!([twice, twice]))],
        ),
    ]
    .concat()
}

fn selectors() -> Vec<Case> {
    const LABELS: &str = "spec.nodeSelector.matchLabels";
    const FIRST: &str = "spec.nodeSelector.matchExpressions[0]";
    let of = |selector: &str, labels: Value| with(json!({selector: {"matchLabels": labels}}));
    let labels = |labels: Value| of("nodeSelector", labels);
    [
        accepted([
            with(json!({"nodeSelector": {}})),
            labels(json!({"example.com/zone": "a-1", "empty": ""})),
            labels(json!({"a.b-c.example/A_b.c": "a"})),
            labels(json!({"n".repeat(63): "a"})),
            operator("In", json!(["a", "b"])),
            operator("NotIn", json!(["a"])),
            operator("DoesNotExist", json!([])),
            expression(json!({"key": "node-role.kubernetes.io/edge", "operator": "Exists"})),
        ]),
        rejected(LABELS, NO_VALUE, [labels(json!({"zone": "not a value"}))]),
        rejected(
            "spec.nodeSelector.matchLabels.zone",
            "may not be more than 63 bytes",
            [labels(json!({"zone": "v".repeat(64)}))],
        ),
        rejected(
            LABELS,
            NO_KEY,
            [
                labels(json!({"not a key": "a"})),
                labels(json!({"n".repeat(64): "a"})),
                labels(json!({"example..com/zone": "a"})),
            ],
        ),
        rejected(
            "spec.podSelector.matchLabels",
            NO_KEY,
            [of("podSelector", json!({"/zone": "a"}))],
        ),
        rejected(
            "spec.namespaceSelector.matchLabels",
            NO_VALUE,
            [of("namespaceSelector", json!({"zone": "a b"}))],
        ),
        rejected(
            FIRST,
            NEEDS_VALUES,
            [
                expression(json!({"key": "zone", "operator": "In"})),
                operator("NotIn", json!([])),
            ],
        ),
        rejected(
            FIRST,
            NO_VALUES,
            ["Exists", "DoesNotExist"].map(|it| operator(it, json!(["a"]))),
        ),
        rejected(
            "spec.nodeSelector.matchExpressions[0].operator",
            r#"supported values: "In", "NotIn", "Exists", "DoesNotExist""#,
            [operator("Is", json!(["a"]))],
        ),
        rejected(
            "spec.nodeSelector.matchExpressions[0].key",
            "should match '^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'",
            [expression(json!({"key": "not a key", "operator": "Exists"}))],
        ),
    ]
    .concat()
}

/// Cases of numeric fields that have a minimum and a maximum.
fn numbers() -> Vec<Case> {
    let at_least_1 = "should be greater than or equal to 1";
    let at_most_a_day = "should be less than or equal to 86400";
    let at_most_4096 = "should be less than or equal to 4096";
    let at_most_100 = "should be less than or equal to 100";
    let limited = |field: &'static str, least, too_little, most, too_much| {
        let key = field.trim_start_matches("spec.");
        [
            accepted([least, most].map(|it: i64| one(key, json!(it)))),
            rejected(field, too_little, [one(key, json!(least - 1))]),
            rejected(field, too_much, [one(key, json!(most + 1))]),
        ]
        .concat()
    };
    [
        limited("spec.quarantineSeconds", 0, NEGATIVE, 86_400, at_most_a_day),
        limited("spec.idleSeconds", 0, NEGATIVE, 86_400, at_most_a_day),
        limited("spec.cooldownSeconds", 0, NEGATIVE, 86_400, at_most_a_day),
        limited("spec.maxBlocksPerNode", 1, at_least_1, 4_096, at_most_4096),
        limited(
            "spec.nearlyExhaustedPercent",
            1,
            at_least_1,
            100,
            at_most_100,
        ),
        accepted([with(json!({"priority": -5, "disabled": true}))]),
    ]
    .concat()
}

fn block_terms() -> Vec<Case> {
    let labels = json!({"matchLabels": {"team": "a"}});
    let expression = json!({"matchExpressions": [{"key": "zone", "operator": "In"}]});
    let too_low = "low is more than high: blocks would be asked for and given back in turn";
    [
        accepted([
            one("assignment", json!("Manual")),
            one("firstBlock", json!("OnDemand")),
            one("namespaceSelector", labels.clone()),
            one("podSelector", labels),
            one("warm", json!({"low": 0, "high": 0})),
            one("warm", json!({"low": 50})),
        ]),
        rejected(
            "spec.assignment",
            r#"supported values: "Automatic", "Manual""#,
            [one("assignment", json!("ByName"))],
        ),
        rejected(
            "spec.firstBlock",
            r#"supported values: "Immediate", "OnDemand""#,
            [one("firstBlock", json!("Never"))],
        ),
        rejected(
            "spec.namespaceSelector.matchExpressions[0]",
            NEEDS_VALUES,
            [one("namespaceSelector", expression.clone())],
        ),
        rejected(
            "spec.podSelector.matchExpressions[0]",
            NEEDS_VALUES,
            [one("podSelector", expression)],
        ),
        rejected("spec.warm", too_low, [one("warm", json!({"low": 51}))]),
        rejected("spec.warm.low", NEGATIVE, [one("warm", json!({"low": -1}))]),
    ]
    .concat()
}

fn address_terms() -> Vec<Case> {
    const GATEWAY4: &str = "spec.ipv4.gateway";
    const GATEWAY6: &str = "spec.ipv6.gateway";
    let gateway4 =
        |gateway: &str| with(json!({"ipv4": {"cidrs": ["10.0.0.0/16"], "gateway": gateway}}));
    let gateway6 = |gateway: &str| json!({"allocationMode": "NodeCIDR", "ipv6": {"cidrs": ["fd00::/48"], "gateway": gateway}});
    let no_gateway4 = "is neither None nor an IPv4 address: write one such as 10.244.0.1, or leave it out for the first usable address of each block";
    let no_gateway6 = "is neither None nor an IPv6 address: write one such as fd00::1, or leave it out for the first usable address of each block";
    let outside = "lies in none of the cidrs, where pods cannot reach it: give an address of the pool, leave it out for the first usable address of each block, or set addressPrefix to Host if pods have a way to it all the same";
    let on_host = |family: &str, cidr: &str, gateway: &str| json!({"addressPrefix": "Host", family: {"cidrs": [cidr], "gateway": gateway}});
    [
        accepted([one("addressPrefix", json!("Pool"))]),
        rejected(
            "spec.addressPrefix",
            r#"supported values: "Block", "Pool", "Host""#,
            [one("addressPrefix", json!("Node"))],
        ),
        accepted(["None", "10.0.0.1"].map(gateway4)),
        accepted(["fd00::1", "fe80::1"].map(gateway6)),
        rejected(GATEWAY4, no_gateway4, ["fd00::1", "none"].map(gateway4)),
        rejected(GATEWAY6, no_gateway6, [gateway6("10.0.0.1")]),
        rejected(
            GATEWAY6,
            "is not in canonical form: write fd00::1",
            [gateway6("FD00::1")],
        ),
        rejected(GATEWAY4, outside, [gateway4("10.1.0.1")]),
        rejected(GATEWAY6, outside, [gateway6("fd00:1::1")]),
        accepted([
            on_host("ipv4", "10.0.0.0/16", "169.254.1.1"),
            on_host("ipv6", "fd00::/48", "fd00:1::1"),
        ]),
    ]
    .concat()
}

fn routes_and_dns() -> Vec<Case> {
    let dns = |key: &str, value: Value| one("dns", json!({ key: value }));
    let route = |dst: &str, gw: &str| one("routes", json!([{"dst": dst, "gw": gw}]));
    let whole = json!({
        "nameservers": ["10.96.0.10"], "domain": "a.example", "search": ["b.example"], "options": ["ndots:5"],
    });
    let no_option =
        "is no option of a resolver: write one an entry, without spaces, such as ndots:5";
    [
        accepted([
            route("0.0.0.0/0", "10.0.0.1"),
            one("routes", json!([{"dst": "fd00::/8"}])),
            one("dns", whole),
            dns("nameservers", json!(["fd00::a", "10.0.0.10"])),
            dns("search", json!([".", "cluster.local.", "_x.example"])),
            dns("domain", json!("")),
            dns("options", json!(["edns0", "timeout:2", "trust-ad"])),
        ]),
        rejected(
            "spec.routes[0].dst",
            NOT_CIDR,
            [route("0.0.0.0", "10.0.0.1")],
        ),
        rejected(
            "spec.routes[0].gw",
            "is not an address: write one such as 10.244.0.1 or fd00::1",
            [route("0.0.0.0/0", "gateway")],
        ),
        rejected(
            "spec.dns.nameservers[1]",
            "is no address: write one such as 10.96.0.10",
            [dns("nameservers", json!(["10.0.0.10", "dns.example"]))],
        ),
        rejected(
            "spec.dns.search[0]",
            "is no domain: write one such as svc.cluster.local",
            ["a.example b.example", "a..example"].map(|it| dns("search", json!([it]))),
        ),
        rejected(
            "spec.dns.domain",
            "is no domain: write one such as cluster.local, or leave it out",
            [dns("domain", json!("a/b"))],
        ),
        rejected(
            "spec.dns.options[0]",
            no_option,
            ["ndots:5 edns0", "ndots:5\n"].map(|it| dns("options", json!([it]))),
        ),
    ]
    .concat()
}

/// Cases of IPAMBlocks. A block's name must follow from its CIDR. Names are unique, so there cannot be two blocks with
/// the same CIDR.
pub fn ipam_blocks() -> Vec<NamedCase> {
    const PLAIN: &str = "10-244-1-64-26";
    const NAME: &str = "the name of a block is its cidr with - for every other sign: blocks are written by the controller alone";
    const NOT_CANONICAL: &str = "is not in canonical form: write 10.244.1.64/26";
    const KINDS: &str = r#"supported values: "Node", "Quarantine""#;
    let with = |fields, cause| {
        let spec = replaced(block("10.244.1.64/26"), fields);
        (PLAIN.to_owned(), spec, cause)
    };
    let of = |name: &str, cidr: &str, cause| (name.to_owned(), block(cidr), cause);
    let owner = |kind: &str| json!({"owner": {"kind": kind, "name": "n1", "uid": "u1", "providerID": "p", "machineID": "m"}});
    let no_uid = json!({"owner": {"kind": "Node", "name": "n1"}});
    let bad_name = Some(("<nil>", NAME));
    let bad_cidr = |message| Some(("spec.cidr", message));
    vec![
        of(PLAIN, "10.244.1.64/26", None),
        of("fd00-10-244--40-122", "fd00:10:244::40/122", None),
        of("fd00---64", "fd00::/64", None),
        of("10-244-1-65-26", "10.244.1.64/26", bad_name),
        of("block-1", "10.244.1.64/26", bad_name),
        of("10-244-1-65-26", "10.244.1.65/26", bad_cidr(NOT_CANONICAL)),
        of("all-of-it", "all.of/it", bad_cidr(NOT_CIDR)),
        with(owner("Quarantine"), None),
        with(json!({"until": "2026-11-21T10:00:00Z"}), None),
        with(owner("Pod"), Some(("spec.owner.kind", KINDS))),
        with(no_uid, Some(("spec.owner.uid", REQUIRED))),
    ]
}

/// Returns the spec of a block that belongs to a live node.
pub fn block(cidr: &str) -> Value {
    json!({
        "cidr": cidr, "pool": "default", "since": "2026-11-21T10:00:00Z",
        "owner": {"kind": "Node", "name": "n1", "uid": "u1"},
    })
}

pub fn subnets() -> Vec<NamedCase> {
    const FIRST: &str = "spec.podCIDRs[0].cidr";
    const NOT_CANONICAL: &str = "is not in canonical form: write 10.244.1.0/24";
    let pod_cidrs = |cidrs: &[&str]| {
        let ranges: Vec<Value> = cidrs.iter().map(|cidr| json!({ "cidr": cidr })).collect();
        json!({"nodeUID": "u", "podCIDRs": ranges})
    };
    let quarantined = |cidr: &str| {
        let ranges = [json!({"cidr": cidr, "pool": "default"})];
        json!({"quarantined": [{"nodeUID": "u", "podCIDRs": ranges, "until": "2026-11-21T10:00:00Z"}]})
    };
    let block = || json!({"cidr": "10.244.1.64/26", "uid": "b1", "pool": "default"});
    let listed = |fields| json!({"nodeUID": "u", "blocks": [replaced(block(), fields)]});
    let all = [
        accepted([
            pod_cidrs(&["10.244.1.0/24", "fd00::/64"]),
            pod_cidrs(&["10.0.0.0/7", "127.0.0.0/24"]),
            quarantined("10.244.1.0/24"),
            listed(json!({})),
            listed(
                json!({"recall": "Drain", "reserved": ["10.244.1.64", "10.244.1.70-10.244.1.79"]}),
            ),
            json!({"pools": [{"name": "default"}], "leakCandidates": [{"address": "10.244.1.65", "podUID": "p"}]}),
        ]),
        rejected(FIRST, NOT_CIDR, [pod_cidrs(&["10.244.1.0"])]),
        rejected(FIRST, NOT_CANONICAL, [pod_cidrs(&["10.244.1.7/24"])]),
        rejected(
            "spec.podCIDRs[1]",
            r#"Duplicate value: {"cidr":"10.244.1.0/24"}"#,
            [pod_cidrs(&["10.244.1.0/24", "10.244.1.0/24"])],
        ),
        rejected(
            "spec.quarantined[0].podCIDRs[0].cidr",
            NOT_CANONICAL,
            [quarantined("10.244.1.7/24")],
        ),
        rejected(
            "spec.quarantined[0].until",
            REQUIRED,
            [json!({"quarantined": [{"nodeUID": "u"}]})],
        ),
        rejected(
            "spec.blocks[0].recall",
            r#"supported values: "IfEmpty", "Drain""#,
            [listed(json!({"recall": "Now"}))],
        ),
        rejected(
            "spec.blocks[0].cidr",
            "is not in canonical form: write 10.244.1.64/26",
            [listed(json!({"cidr": "10.244.1.65/26"}))],
        ),
        rejected(
            "spec.blocks[1]",
            r#"Duplicate value: {"cidr":"10.244.1.64/26"}"#,
            [json!({"blocks": [block(), block()]})],
        ),
        rejected(
            "spec.blocks[0].uid",
            REQUIRED,
            [json!({"blocks": [{"cidr": "10.244.1.64/26", "pool": "default"}]})],
        ),
    ];
    let named = |(spec, cause): Case| ("n".to_owned(), spec, cause);
    let mut cases: Vec<NamedCase> = all.into_iter().flatten().map(named).collect();
    // A node name of the maximum length, 253 characters
    let longest = ["n".repeat(63).as_str(); 4].join(".")[..253].to_owned();
    cases.push((longest, pod_cidrs(&["10.244.1.0/24"]), None));
    cases
}

/// Statuses of NodeSubnets that the API server accepts or rejects. They are written to an existing NodeSubnet.
pub fn statuses() -> Vec<Case> {
    let whole = json!({
        "nodeUID": "u", "pools": [{"pool": "default", "demand": 40}],
        "blocks": [{"cidr": "10.244.1.64/26", "uid": "b1", "used": 1, "cooling": 2, "free": 61}],
        "orphans": [{"address": "10.244.1.65", "podUID": "p1"}],
    });
    let two_uids = json!({"blocks": [
        {"cidr": "10.244.1.64/26", "uid": "b1", "released": true}, {"cidr": "10.244.1.64/26", "uid": "b2"},
    ]});
    [
        accepted([whole, two_uids]),
        rejected(
            "status.pools[0].demand",
            NEGATIVE,
            [json!({"pools": [{"pool": "default", "demand": -1}]})],
        ),
        rejected(
            "status.pools[1]",
            r#"Duplicate value: {"pool":"a"}"#,
            [json!({"pools": [{"pool": "a", "demand": 1}, {"pool": "a", "demand": 2}]})],
        ),
        rejected(
            "status.blocks[0].uid",
            REQUIRED,
            [json!({"blocks": [{"cidr": "10.244.1.64/26"}]})],
        ),
        rejected(
            "status.blocks[0].used",
            NEGATIVE,
            [json!({"blocks": [{"cidr": "10.244.1.64/26", "uid": "b1", "used": -1}]})],
        ),
        rejected(
            "status.orphans[0].address",
            REQUIRED,
            [json!({"orphans": [{"podUID": "p1"}]})],
        ),
    ]
    .concat()
}

/// Returns cases of updates: a pool's spec before the update and after it, and the cause if the API server rejects the
/// update.
pub fn transitions() -> Vec<(Value, Value, Option<Cause>)> {
    const STAYS4: &str = "ipv4 cannot be removed, as nodes may hold ranges of it: put it back, set disabled, and add a new pool for the other family";
    const STAYS6: &str = "ipv6 cannot be removed, as nodes may hold ranges of it: put it back, set disabled, and add a new pool for the other family";
    const MODE: &str =
        "is immutable: add a new pool that allocates the other way, and set disabled on this one";
    let dual = || with(json!({"ipv6": {"cidrs": ["fd00::/48"]}}));
    let ipv4 = || v4(&["10.0.0.0/16"], 24);
    let of = |reserved: &[&str], cidrs: &[&str]| {
        with(json!({"ipv4": {"cidrs": cidrs}, "reserved": reserved}))
    };
    let two_cidrs = || of(&["10.1.0.1"], &["10.0.0.0/16", "10.1.0.0/16"]);
    let more_reserved = of(&["10.0.0.1", "10.1.0.1"], &["10.0.0.0/16"]);
    let more_cidrs = ["10.0.0.0/16", "10.5.0.0/16"];
    vec![
        // A CIDR that contains a reserved entry may be removed. But when a reserved entry is added, the server checks
        // all reserved entries
        (two_cidrs(), of(&["10.1.0.1"], &["10.0.0.0/16"]), None),
        (
            two_cidrs(),
            more_reserved,
            Some(("spec.reserved", OUTSIDE_10_1_0_1)),
        ),
        (ipv4(), dual(), None),
        (ipv4(), v4(&more_cidrs, 20), None),
        (v4(&more_cidrs, 24), ipv4(), None),
        (
            with(json!({})),
            blocks(json!({})),
            Some(("spec.allocationMode", MODE)),
        ),
        (dual(), ipv4(), Some(("spec.ipv6", STAYS6))),
        (dual(), v6(&["fd00::/48"], 64), Some(("spec.ipv4", STAYS4))),
    ]
}
