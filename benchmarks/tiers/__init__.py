"""More messages at once than the arena holds: what do tiers below it cost, and what is lost or held up without them?"""

FAILING, BLOCKING, TIERS = "failing", "blocking", "tiers"
VARIANTS = {
    FAILING: "without tiers; what does not fit is refused",
    BLOCKING: "without tiers; the sender waits for its receiver",
    TIERS: "files below the arena",
}
