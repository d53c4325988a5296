"""The common English words that the instruct domain plays with."""

TEXT = """
apple arrow autumn baker balloon banana barn basket beach bell bird blanket boat bone book bottle bread bridge brush
button cabin cake camel camera candle carpet castle chair cheese circle clock cloud coffee comet copper corn crown cup
dance desert diamond doctor door dragon drum eagle earth engine farm feather field finger fire fish flag flower forest
fox frog fruit garden gate ghost glass glove gold grape guitar hammer harbor heart honey horse house ice island jacket
juice jungle kettle key king kite kitten knife ladder lake lamp leaf lemon letter lion lizard magnet market mirror money
moon morning mountain mouse music needle night ocean onion orange owl palace paper parrot pencil piano pilot planet plate
pocket pond potato prince puzzle queen rabbit radio rain ribbon ring river robot rocket rose salt school seed shadow ship
silver sister snow spider spoon star stone storm sugar summer table temple thunder ticket tiger tower train tree turtle
umbrella valley village violin wagon water whale wheel window winter wolf yard zebra
"""

WORDS = tuple(TEXT.split())
